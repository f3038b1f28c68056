"""Videos in prompts: the greedy tokens of `transformers`, whatever else is in the batch."""

import asyncio
import copy
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from aioserve import AsyncEngine, EngineConfig, MultimodalPrompt, SamplingParams, Video
from aioserve.config import CacheConfig, ModelConfig, RunnerConfig, SchedulerConfig
from aioserve.engine import RequestStream
from aioserve.errors import RequestError, RequestFailedError
from aioserve.features.multimodal.decoding import EncodedImage
from aioserve.features.multimodal.encoding_pieces import EncodingPieces
from aioserve.features.multimodal.prompt import VideoProcessor
from aioserve.lab.decision_log.reader import DecisionLog
from aioserve.lab.decision_log.replay import replay
from aioserve.model_source.info import ModelInfo
from tests.kit import executor_of
from tests.matrix.places import RunnerOfThreads, loading_one_at_a_time
from tests.multimodal.pictures import bomb
from tests.processes import COMPUTING_SECONDS
from tests.seeing_models import NUM_TOKENS, VIDEO, VIDEO_KINDS, Seeing, picture
from tests.slow import mostly_slow

pytest.importorskip("PIL")

ONE = "qwen2_5_vl"  # where any of them will do
Prompt = tuple[str, list[Any], list[Video]]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Seeing]:
    made: dict[str, Seeing] = {}

    def get(kind: str) -> Seeing:
        if kind not in made:
            made[kind] = Seeing(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return get


def clip(seed: int, num_frames: int, width: int, height: int, fps: float | None = None) -> Video:
    """Frames of a video that differ from each other."""
    return Video([picture(seed * 100 + i, width, height) for i in range(num_frames)], fps)


def prompts_of(model: Seeing) -> list[Prompt]:
    """With videos alone, beside images, of several rates, and without any."""
    image, other = picture(1, 30, 30), picture(2, 50, 30)
    short, long = clip(1, 4, 40, 30), clip(2, 7, 60, 40, 1.5)
    return [
        (f"{VIDEO} What happens?", [], [short]),
        (f"See {model.mark} and {VIDEO} or {model.mark}: what?", [image, other], [long]),
        (f"{VIDEO}{VIDEO} to be {model.mark} or not", [image], [long, short]),
        ("No picture at all, my lord", [], []),
        (f"{VIDEO} What happens?", [], [Video(short.frames, 0.8)]),
        (f"{model.mark} What is this?", [image], []),
    ]


def make_config(
    model: Seeing, *, num_kv_blocks: int = 400, policy: str = "chunked_prefill", **scheduler: Any
) -> EngineConfig:
    fused = scheduler.pop("fused", True)
    quantization = scheduler.pop("quantization", None)
    return EngineConfig(
        model=ModelConfig(
            model=str(model.path), dtype="float32", fused=fused, quantization=quantization
        ),
        runner=RunnerConfig(threads=1),
        cache=CacheConfig(num_kv_blocks=num_kv_blocks, block_size=8, watermark=0),
        scheduler=SchedulerConfig(policy=policy, **scheduler),
    )


async def collect(
    engine: AsyncEngine, text: Any, images: Sequence[Any], videos: Sequence[Video], **params: Any
) -> list[int]:
    wanted = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, **params}
    prompt = MultimodalPrompt(text, images, videos)
    return await read(await engine.add_request(prompt, SamplingParams(**wanted)))


async def read(stream: RequestStream) -> list[int]:
    return [token async for output in stream for token in output.token_ids]


async def serve(config: EngineConfig, prompts: Sequence[Prompt], runner: Any = None) -> Any:
    """The tokens of all of them, which begin together, and the statistics."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    async with AsyncEngine(config, runner=runner) as engine:
        await engine.pause()
        added = (engine.add_request(MultimodalPrompt(*prompt), params) for prompt in prompts)
        streams = await asyncio.gather(*added)
        await engine.resume()
        return await asyncio.gather(*map(read, streams)), engine.get_stats()


def expected_of(model: Seeing, prompts: Sequence[Prompt]) -> list[list[int]]:
    return [model.tokens(text, images, videos=videos) for text, images, videos in prompts]


CASES: dict[str, dict[str, Any]] = {
    "chunks": {"options": {"chunk_size": 37}},
    "unfused": {"options": {"chunk_size": 37}, "fused": False},
    "whole": {"policy": "fcfs", "max_encoder_tokens": 2048},
    "small chunks": {"options": {"chunk_size": 5}},
    "starved": {"options": {"chunk_size": 16}, "num_kv_blocks": 34},
    "encoder": {"options": {"chunk_size": 64}, "max_encoder_tokens": 60},
    "pieces": {"options": {"chunk_size": 37}, "encoder_chunk_tokens": 5},
}


@pytest.mark.parametrize(
    ("kind", "case"),
    mostly_slow(
        itertools.product(VIDEO_KINDS, CASES),
        but=[*((kind, "chunks") for kind in VIDEO_KINDS[::2]), (ONE, "starved"), (ONE, "pieces")],
    ),
)
async def test_tokens_are_those_of_generate(
    seeing: Callable[[str], Seeing], kind: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, advanced = seeing(kind), []
    prompts, advance = prompts_of(model), EncodingPieces.advance

    def noting(pieces: EncodingPieces, *args: Any) -> None:
        advance(pieces, *args)
        advanced.append(args)

    monkeypatch.setattr(EncodingPieces, "advance", noting)
    tokens, stats = await serve(make_config(model, **CASES[case]), prompts)
    expected = expected_of(model, prompts)
    assert tokens == expected
    assert expected[0] != expected[3]
    if kind != "qwen2_vl":  # which does not know how fast a video is
        assert expected[0] != expected[4]
    assert stats.num_encoder_inputs >= 8  # one for each two frames
    if case == "starved":
        assert stats.num_preemptions > 0
    if case == "pieces":
        assert advanced


async def test_a_cached_prefix_is_found_for_the_same_frames_at_the_same_rate_alone(
    seeing: Callable[[str], Seeing],
) -> None:
    model = seeing(ONE)
    text = f"A long beginning of a prompt before any picture {VIDEO} and then some words"
    video, params = clip(3, 6, 60, 60, 2.0), SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
    others = [Video(video.frames, 0.5), clip(4, 6, 60, 60, 2.0)]
    cached = []
    async with AsyncEngine(make_config(model, options={"chunk_size": 50})) as engine:
        for shown in (video, video, *others):
            tokens: list[int] = []
            async for output in engine.generate(MultimodalPrompt(text, (), [shown]), params):
                tokens += output.token_ids
            assert tokens == model.tokens(text, [], videos=[shown])[: len(tokens)]
            cached.append(output.num_cached_tokens)
            num_prompt = output.num_prompt_tokens
    assert cached[0] == 0
    assert cached[1] > num_prompt - 10  # all but the last block
    assert 0 < cached[3] < cached[2] < cached[1] - 30  # the first frames are at the same time


async def test_frames_in_several_requests_are_encoded_once(
    seeing: Callable[[str], Seeing],
) -> None:
    model, video = seeing(ONE), clip(5, 6, 50, 50)
    prompts: list[Prompt] = [(f"{number} {VIDEO} is it?", [], [video]) for number in range(4)]
    tokens, stats = await serve(make_config(model), prompts)
    assert tokens == expected_of(model, prompts)
    assert stats.num_encoder_inputs == 3
    assert stats.num_encoder_hits == 9


async def test_ranks_turn_videos_by_time_as_one_process_does(
    seeing: Callable[[str], Seeing],
) -> None:
    model = seeing(ONE)
    ranks = RunnerConfig(threads=2, tensor_parallel_size=2, rank_timeout=COMPUTING_SECONDS)
    config = make_config(model, **CASES["chunks"])
    config = msgspec.structs.replace(config, runner=ranks)
    runner = RunnerOfThreads(config, ModelInfo(config.model))
    prompts = prompts_of(model)
    with loading_one_at_a_time():
        tokens, _ = await serve(config, prompts, runner)
    assert tokens == expected_of(model, prompts)


async def test_tokens_of_a_quantized_text_model_are_those_of_its_rounded_weights(
    seeing: Callable[[str], Seeing],
) -> None:
    from aioserve.features.quantized import quantize

    model = seeing(ONE)
    rounded = copy.copy(model)
    rounded.model = copy.deepcopy(model.model)
    for name, weight in rounded.model.named_parameters():
        if weight.ndim == 2 and "visual" not in name:
            weight.data.copy_(quantize(weight.data, "Q8_0").dequantize(weight.dtype))
    config = make_config(model, **CASES["chunks"], quantization="int8")
    prompts = prompts_of(model)
    tokens, _ = await serve(config, prompts)
    assert tokens == expected_of(rounded, prompts) != expected_of(model, prompts)


async def test_messages_mention_videos_as_parts(seeing: Callable[[str], Seeing]) -> None:
    model, image, video = seeing(ONE), picture(3, 40, 40), clip(6, 4, 40, 40)
    said = {"type": "text", "text": "What is this?"}
    shown = [{"type": "video"}, said, {"type": "image"}]
    messages = [{"role": "user", "content": shown}]
    rendered = model.processor.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    async with AsyncEngine(make_config(model)) as engine:
        assert engine.media.video_placeholder == "<|video_pad|>"
        found = await collect(engine, messages, [image], [video])
        assert found == model.tokens(rendered, [image], videos=[video])
        for content, videos, message in (
            (shown[:2], [video, video], "the messages mention 1 videos, and 2 come"),
            ([{**said, "text": VIDEO}, shown[0]], [video], "mentions 2 videos"),
            ([{"type": "audio"}], [video], r'or \{"type": "image"\} or \{"type": "video"\}, got'),
        ):
            with pytest.raises(RequestError, match=message):
                await collect(engine, [{"role": "user", "content": content}], [], videos)


FRAME = picture(0, 30, 30)


@pytest.mark.parametrize(
    ("video", "said"),
    [
        ([FRAME, FRAME], "a video must be a Video, got list"),
        (Video([]), "at least one frame"),
        (Video([FRAME, "a name"]), "frame 1: an image must be one of PIL"),
        (Video([FRAME, picture(0, 31, 30)]), "frame 1 is of 31 x 30, and frame 0 of 30 x 30"),
        (Video(np.zeros((4, 8, 8), np.uint8)), "frame 0: an image must be"),
        (Video(np.zeros((4, 1, 201, 3), np.uint8)), "201 x 1 is too narrow"),
        (Video([EncodedImage(bomb(1, 65_535), "videos[1]")]), "too narrow"),  # undecoded
    ],
)
async def test_what_is_no_video_is_refused_by_its_number(
    seeing: Callable[[str], Seeing], video: Any, said: str
) -> None:
    async with AsyncEngine(make_config(seeing(ONE))) as engine:
        with pytest.raises(RequestError, match=said) as raised:
            await collect(engine, VIDEO * 2, [], [Video([FRAME] * 2), video])
    assert raised.value.param == "videos[1]"


@pytest.mark.parametrize("fps", [0, -1.0, float("nan"), float("inf"), True, "2", 1e-9])
def test_a_rate_that_is_none_is_refused(fps: Any) -> None:
    with pytest.raises(RequestError, match=r"fps must be a number from 0\.001 to 1000") as raised:
        Video([FRAME], fps)
    assert raised.value.param == "fps"


async def test_arrays_and_tensors_of_frames_are_seen_alike(
    seeing: Callable[[str], Seeing],
) -> None:
    import torch

    model, video = seeing(ONE), clip(7, 5, 40, 30)
    array = np.stack([np.asarray(frame) for frame in video.frames])
    same = [Video(array), Video(torch.from_numpy(array)), Video(list(array), 2)]
    async with AsyncEngine(make_config(model)) as engine:
        for each in (video, *same):
            found = await collect(engine, VIDEO, [], [each])
            assert found == model.tokens(VIDEO, [], videos=[video])
        assert engine.get_stats().num_encoder_inputs == 3


async def test_videos_too_long_for_a_prompt_or_a_step_are_refused(
    seeing: Callable[[str], Seeing], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeing(ONE)
    async with AsyncEngine(make_config(model, max_encoder_tokens=25)) as engine:
        with pytest.raises(RequestError, match=r"videos\[0\] does not fit: it has 36 tok") as said:
            await collect(engine, VIDEO, [], [clip(1, 4, 48, 48)])
        assert said.value.param == "videos[0]"
        monkeypatch.setattr(VideoProcessor, "prepare", None)
        with pytest.raises(RequestError, match=r"at least \d+ tokens"):
            await collect(engine, VIDEO, [], [clip(1, 60, 48, 48)])
        with pytest.raises(RequestError, match="cannot be served with videos"):
            await collect(engine, VIDEO, [], [clip(1, 2, 8, 8)], truncate_prompt_tokens=5)


async def test_one_frame_is_no_video_for_qwen3_vl(seeing: Callable[[str], Seeing]) -> None:
    async with AsyncEngine(make_config(seeing("qwen3_vl"))) as engine:
        with pytest.raises(RequestError, match="must have 2 frames or more") as raised:
            await collect(engine, VIDEO, [], [Video([FRAME])])
    assert raised.value.param == "videos[0]"


async def test_a_model_that_reads_images_alone_refuses_videos(tmp_path: Path) -> None:
    model = Seeing("idefics3", tmp_path)
    async with AsyncEngine(make_config(model)) as engine:
        assert engine.media.refuses_images == ""
        for refused in (engine.media.refuses_videos, "this model reads no videos"):
            with pytest.raises(RequestError, match=refused) as raised:
                await collect(engine, VIDEO, [], [Video([FRAME, FRAME])])
            assert raised.value.param == "videos[0]"


async def test_another_video_processor_is_refused_and_images_are_served(tmp_path: Path) -> None:
    model = Seeing(ONE, tmp_path)
    named = '{"video_processor_type": "OtherVideoProcessor"}'
    (tmp_path / "video_preprocessor_config.json").write_text(named)
    text, images, _ = prompts_of(model)[5]
    async with AsyncEngine(make_config(model)) as engine:
        assert await collect(engine, text, images, []) == model.tokens(text, images)
        with pytest.raises(RequestError, match="it is a OtherVideoProcessor"):
            await collect(engine, VIDEO, [], [Video([FRAME, FRAME])])


async def test_a_decision_log_of_videos_is_replayed_without_them(
    seeing: Callable[[str], Seeing], tmp_path: Path
) -> None:
    model, path = seeing(ONE), tmp_path / "log"
    config = make_config(model, **CASES["chunks"], decision_log=str(path))
    await serve(config, prompts_of(model))
    assert replay(DecisionLog(path)).divergence is None


async def test_the_time_of_a_video_may_go_beyond_the_length_of_the_model(
    seeing: Callable[[str], Seeing],
) -> None:
    model, slow = seeing(ONE), clip(8, 6, 40, 40, 0.001)  # 8,000 positions from frames to frames
    prompts: list[Prompt] = [(f"{VIDEO} What happens?", [], [slow]), ("Nothing", [], [])]
    config = make_config(model, options={"chunk_size": 11})
    async with AsyncEngine(config) as engine:
        assert engine.max_model_len < 8_000
        module = executor_of(engine)._encoder._module
        features = module.get_image_features

        def fail(**arguments: Any) -> Any:
            raise ValueError("what is this?")

        module.get_image_features = fail
        asked = (collect(engine, *prompt) for prompt in prompts)
        failure, beside = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(failure, RequestFailedError)
        module.get_image_features = features
        again = await collect(engine, *prompts[0])
    assert [again, beside] == expected_of(model, prompts)
