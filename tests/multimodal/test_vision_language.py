"""Models that see: the greedy tokens of `transformers`, whatever else is in the batch."""

import asyncio
import copy
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aioserve.policies.fcfs import FCFSScheduler

from aioserve import AsyncEngine, EngineConfig, MultimodalPrompt, PoolingParams, SamplingParams
from aioserve.config import AdapterConfig, CacheConfig, ModelConfig, RunnerConfig, SchedulerConfig
from aioserve.engine.prompt import Encoded
from aioserve.errors import ConfigError, RequestError, RequestFailedError
from aioserve.features.multimodal.decoding import EncodedImage
from aioserve.features.multimodal.encoding_pieces import EncodingPieces
from aioserve.features.multimodal.image_encoder import ImageEncoder
from aioserve.features.multimodal.prompt import ImageProcessor
from aioserve.lab.decision_log.reader import DecisionLog
from aioserve.lab.decision_log.replay import replay
from aioserve.model_source.info import ModelInfo
from aioserve.model_source.vision_families import FAMILIES
from aioserve.request import EncoderInput, Request, WaitReason
from aioserve.runner.attention.backend import StepInputs
from aioserve.runner.cpu.fused import WholeDecoder
from aioserve.runner.cpu.models import CpuPlace
from aioserve.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from tests.adapters import make_adapter, merge
from tests.greedy import MARGIN
from tests.kit import executor_of
from tests.matrix.places import RunnerOfThreads, loading_one_at_a_time
from tests.multimodal.pictures import bomb
from tests.processes import COMPUTING_SECONDS, PATIENCE
from tests.seeing_models import (
    FEW_KINDS,
    NUM_TOKENS,
    SEEING_KINDS,
    Seeing,
    picture,
)
from tests.slow import mostly_slow

pytest.importorskip("PIL")

ONE = "idefics3"  # where any of them will do
WITH_EXPERTS = ("llama4", "qwen3_vl_moe")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Seeing]:
    made: dict[str, Seeing] = {}

    def get(kind: str) -> Seeing:
        if kind not in made:
            made[kind] = Seeing(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return get


def make_config(
    model: Seeing,
    *,
    fused: bool = True,
    num_kv_blocks: int = 400,
    policy: str = "chunked_prefill",
    kv_cache_dtype: Any = "auto",
    **scheduler: Any,
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(model.path), dtype="float32", fused=fused),
        runner=RunnerConfig(threads=1),
        cache=CacheConfig(
            num_kv_blocks=num_kv_blocks,
            block_size=8,
            watermark=0,
            kv_cache_dtype=kv_cache_dtype,
        ),
        scheduler=SchedulerConfig(policy=policy, **scheduler),
    )


async def collect(engine: AsyncEngine, text: Any, images: Sequence[Any], **params: Any) -> Any:
    wanted = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, **params}
    samples: list[list[int]] = [[] for _ in range(wanted.get("n", 1))]
    async for output in engine.generate(MultimodalPrompt(text, images), SamplingParams(**wanted)):
        samples[output.index] += output.token_ids
    return samples if "n" in wanted else samples[0]


async def serve(config: EngineConfig, prompts: Sequence[tuple[str, Sequence[Any]]]) -> Any:
    async with AsyncEngine(config) as engine:
        tokens = await asyncio.gather(*(collect(engine, *prompt) for prompt in prompts))
        return tokens, stats_of(engine)


def stats_of(engine: AsyncEngine) -> Any:
    return engine.get_stats()


def encoder_of(engine: AsyncEngine) -> Any:
    return executor_of(engine)._encoder


CASES: dict[str, dict[str, Any]] = {
    "chunks": {"options": {"chunk_size": 37}},
    "unfused": {"options": {"chunk_size": 37}, "fused": False},
    "whole": {"policy": "fcfs", "max_encoder_tokens": 2048},
    "small chunks": {"options": {"chunk_size": 5}},
    "starved": {"options": {"chunk_size": 16}, "num_kv_blocks": 25},
    "encoder": {"options": {"chunk_size": 64}, "max_encoder_tokens": 60},
    "pieces": {"options": {"chunk_size": 37}, "encoder_chunk_tokens": 5},
}


def settings_of(kind: str, case: str) -> dict[str, Any]:
    """Those of a case, with more room for Gemma 4, whose images are of 70 tokens."""
    room = {"starved": {"num_kv_blocks": 58}, "encoder": {"max_encoder_tokens": 140}}
    return CASES[case] | (room.get(case, {}) if kind.startswith("gemma4") else {})


def cut_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let images that are encoded in pieces stop within layers, though they are small."""
    monkeypatch.setattr("aioserve.features.multimodal.encoding_pieces.MULTIPLICATIONS", 1)
    monkeypatch.setattr("aioserve.features.multimodal.encoding_pieces.LEAST_ROWS", 7)


@pytest.mark.parametrize("case", mostly_slow(CASES, but=["chunks"]))
@pytest.mark.parametrize("kind", mostly_slow(SEEING_KINDS, but=FEW_KINDS))
async def test_tokens_are_those_of_generate(
    seeing: Callable[[str], Seeing], kind: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, advanced = seeing(kind), []
    prompts, advance = model.prompts(), EncodingPieces.advance

    def noting(pieces: EncodingPieces, *args: Any) -> None:
        advance(pieces, *args)
        advanced.append(args)

    monkeypatch.setattr(EncodingPieces, "advance", noting)
    cut_layers(monkeypatch)
    tokens, stats = await serve(make_config(model, **settings_of(kind, case)), prompts)
    expected = [model.tokens(text, images) for text, images in prompts]
    assert tokens == expected
    assert expected[4] != expected[5] != model.tokens(prompts[5][0], prompts[1][1][:1])
    assert stats.num_encoder_inputs >= 4
    if case == "starved":
        assert stats.num_preemptions > 0
    if case == "pieces":
        assert advanced


# Not with experts: which of them a token takes is chance, then.
@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in SEEING_KINDS if kind not in WITH_EXPERTS])
async def test_tokens_in_bfloat16_are_greedy_within_rounding(
    seeing: Callable[[str], Seeing], kind: str
) -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    model = seeing(kind)
    config = make_config(model, **CASES["chunks"])
    config = msgspec.structs.replace(
        config, model=msgspec.structs.replace(config.model, dtype="bfloat16")
    )
    found, _ = await serve(config, model.prompts())
    # loaded so: what is cast has its rotary frequencies rounded, too
    narrow = AutoModelForImageTextToText.from_pretrained(model.path, dtype=torch.bfloat16).eval()
    for (text, images), tokens in zip(model.prompts(), found, strict=True):
        logits = model.logits(text, images, tokens, narrow)
        of_tokens = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert ((logits.amax(1) - of_tokens) / logits.std(1)).max() < MARGIN[torch.bfloat16]


async def test_one_image_in_many_prompts_is_encoded_once(seeing: Callable[[str], Seeing]) -> None:
    model, same = seeing(ONE), picture(7, 50, 50)
    prompts = [(f"{number} {model.mark} is it?", [same]) for number in range(5)]
    tokens, stats = await serve(make_config(model), prompts)
    assert tokens == [model.tokens(*prompt) for prompt in prompts]
    assert stats.num_encoder_inputs == 1
    assert stats.num_encoder_hits == 4


@pytest.mark.parametrize("kind", mostly_slow(SEEING_KINDS, but=["gemma3", "qwen2_5_vl"]))
async def test_a_cached_prefix_is_found_for_the_same_image_alone(
    seeing: Callable[[str], Seeing], kind: str
) -> None:
    model = seeing(kind)
    text = f"A long beginning of a prompt before any picture {model.mark} and then some words"
    images = [picture(1, 60, 60), picture(2, 60, 60)]
    config = make_config(model, options={"chunk_size": 50})
    cached = []
    async with AsyncEngine(config) as engine:
        for image in (images[0], images[0], images[1]):
            tokens, num_cached = [], 0
            params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
            async for output in engine.generate(MultimodalPrompt(text, [image]), params):
                tokens += output.token_ids
                num_cached = output.num_cached_tokens
                num_prompt = output.num_prompt_tokens
            assert tokens == model.tokens(text, [image])
            cached.append(num_cached)
    assert cached[0] == 0
    assert cached[1] > num_prompt - 10  # all but the last block
    assert 0 < cached[2] < cached[1] - 3  # what is before the image


async def test_samples_of_a_prompt_share_its_image(seeing: Callable[[str], Seeing]) -> None:
    model = seeing(ONE)
    text, images = model.prompts()[1]
    async with AsyncEngine(make_config(model)) as engine:
        samples = await collect(engine, text, images, n=3)
        stats = stats_of(engine)
    assert samples == [model.tokens(text, images)] * 3
    assert stats.num_encoder_inputs == 2


async def test_a_request_waits_for_room_for_its_image(
    seeing: Callable[[str], Seeing], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeing(ONE)
    prompts = [(f"{model.mark} number {i}", [picture(i, 60, 60)]) for i in range(4)]
    reasons: set[WaitReason] = set()
    async with AsyncEngine(make_config(model, policy="fcfs", max_encoder_tokens=40)) as engine:
        schedule, add_request = FCFSScheduler.schedule, FCFSScheduler.add_request

        def noting(scheduler: FCFSScheduler) -> SchedulerOutput:
            output = schedule(scheduler)
            reasons.update(scheduler.get_wait_reasons().values())
            return output

        monkeypatch.setattr(FCFSScheduler, "schedule", noting)
        encode = encoder_of(engine)._encode
        all_are_here = threading.Event()

        def counting(scheduler: FCFSScheduler, request: Request) -> None:
            add_request(scheduler, request)
            if scheduler.get_num_unfinished_requests() == len(prompts):
                all_are_here.set()

        def when_all_are_here(batch: Any) -> None:
            assert all_are_here.wait(PATIENCE)
            encode(batch)

        monkeypatch.setattr(FCFSScheduler, "add_request", counting)
        monkeypatch.setattr(encoder_of(engine), "_encode", when_all_are_here)
        tokens = await asyncio.gather(*(collect(engine, *prompt) for prompt in prompts))
    assert tokens == [model.tokens(*prompt) for prompt in prompts]
    assert WaitReason.ENCODER_BUDGET in reasons


@contextmanager
def broken(engine: AsyncEngine, is_bad: Callable[[Any], bool]) -> Iterator[None]:
    """Its encoder raises where it meets such pixels."""
    encoder = encoder_of(engine)
    features = encoder._module.get_image_features

    def get(pixel_values: Any, **arguments: Any) -> Any:
        if is_bad(pixel_values):
            raise ValueError("what is this?")
        return features(pixel_values=pixel_values, **arguments)

    encoder._module.get_image_features = get
    yield
    encoder._module.get_image_features = features


def on_ranks(config: EngineConfig, num_ranks: int) -> tuple[EngineConfig, RunnerOfThreads]:
    """The same on a number of ranks, and what runs them."""
    ranks = RunnerConfig(
        threads=num_ranks, tensor_parallel_size=num_ranks, rank_timeout=COMPUTING_SECONDS
    )
    config = msgspec.structs.replace(config, runner=ranks)
    return config, RunnerOfThreads(config, ModelInfo(config.model))


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_an_image_that_cannot_be_encoded_fails_who_needs_it(
    seeing: Callable[[str], Seeing], num_ranks: int
) -> None:
    model, config, runner = seeing(ONE), make_config(seeing(ONE)), None
    if num_ranks > 1:  # the first one encodes, and the others know as well
        config, runner = on_ranks(config, num_ranks)
    bad, good = picture(1, 30, 30).point(lambda _: 255), picture(2, 30, 30)
    text = f"{model.mark} What is this?"
    prompts = [(text, [bad]), (text, [good]), (f"It: {model.mark}", [bad]), ("Nothing", [])]
    with loading_one_at_a_time():
        async with AsyncEngine(config, runner=runner) as engine:
            with broken(engine, lambda pixels: bool((pixels == 1).flatten(1).all(1).any())):
                found = await asyncio.gather(
                    *(collect(engine, *prompt) for prompt in prompts), return_exceptions=True
                )
            again = await collect(engine, *prompts[0])  # nothing of the failure is left
    for failure in (found[0], found[2]):
        assert isinstance(failure, RequestFailedError)
        assert "an image of this request could not be encoded: what is this?" in str(failure)
    assert [found[1], found[3]] == [model.tokens(*prompts[1]), model.tokens(*prompts[3])]
    assert again == model.tokens(*prompts[0])


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_an_image_encoded_in_pieces_that_cannot_be_fails_who_needs_it(
    seeing: Callable[[str], Seeing], num_ranks: int
) -> None:
    model, runner = seeing(ONE), None
    config = make_config(model, encoder_chunk_tokens=5)
    if num_ranks > 1:
        config, runner = on_ranks(config, num_ranks)
    bad, good = picture(1, 60, 60).point(lambda _: 255), picture(2, 60, 60)
    text = f"{model.mark} What is this?"
    with loading_one_at_a_time():
        async with AsyncEngine(config, runner=runner) as engine:
            beside = asyncio.create_task(collect(engine, "Nothing", [], max_tokens=60))
            with broken(engine, lambda pixels: bool((pixels == 1).all())):
                found = await asyncio.gather(
                    collect(engine, text, [bad]),
                    collect(engine, text, [good]),
                    return_exceptions=True,
                )
            again = await collect(engine, text, [bad])
            assert len(await beside) == 60
    assert isinstance(found[0], RequestFailedError)
    assert "could not be encoded: what is this?" in str(found[0])
    assert found[1] == model.tokens(text, [good])
    assert again == model.tokens(text, [bad])
    assert not [thread for thread in threading.enumerate() if thread.name == "aioserve-encoder"]


async def test_no_vector_is_told_of_an_image_that_cannot_be_encoded(
    seeing: Callable[[str], Seeing], tmp_path: Path
) -> None:
    model, path = seeing(ONE), tmp_path / "log"
    prompt = MultimodalPrompt(f"{model.mark} What is this?", [picture(2, 30, 30)])
    pooling = PoolingParams(pooling="mean")
    config = make_config(model, decision_log=str(path))
    async with AsyncEngine(config) as engine:
        refused = pytest.raises(RequestFailedError, match="could not be encoded: what is this")
        with broken(engine, lambda _: True), refused:
            await engine.embed(prompt, pooling)
        assert len((await engine.embed(prompt, pooling)).embedding) == 64
    assert replay(DecisionLog(path)).divergence is None


def a_step(request_id: str, tokens: list[int], begin: int) -> tuple[Any, Any]:
    """That runs the tokens of a new request with one image in front, from `begin` on."""
    item = EncoderInput(0, 4, "X", {})
    new = NewRequestData(
        request_id, tokens, len(tokens), SamplingParams(), frozenset(), [0], begin, (item,)
    )
    num_tokens = len(tokens) - begin
    step = SchedulerOutput(
        1, [new], CachedRequestData([], [], {}), {request_id: num_tokens}, num_tokens, [], []
    )
    positions = np.arange(begin, len(tokens))
    inputs = StepInputs(
        [request_id],
        np.zeros(1, np.int64),
        np.asarray(tokens[begin:]),
        positions,
        positions,
        np.asarray([0, num_tokens]),
        np.asarray([len(tokens)]),
        np.zeros((1, 1), np.int32),
        np.zeros(1, np.int64),
        np.zeros(1, np.int64),
    )
    return inputs, step


def test_a_failure_is_known_to_who_comes_with_the_step_that_drops_its_image(
    seeing: Callable[[str], Seeing],
) -> None:
    model = seeing(ONE)
    mark = model.processor.image_token_id
    encoder = ImageEncoder(model.model, FAMILIES[ONE][0], [mark], CpuPlace())
    tokens = [mark] * 4 + [7]
    encoder.encode([(EncoderInput(0, 4, "X", {}), 4)])  # there are no pixels in it
    for says, expected in ((["X"], [0]), ([], [])):
        inputs, step = a_step("b", tokens, begin=4)  # all of the image was found cached
        encoder.set(0, step.scheduled_new_reqs[0])
        encoder.forget(says)
        encoder.prepare(inputs, step)
        assert list(encoder.errors) == expected
        encoder.drop(0)
    inputs, step = a_step("c", tokens, begin=0)  # nobody had it encoded
    encoder.set(0, step.scheduled_new_reqs[0])
    encoder.prepare(inputs, step)
    assert "was not encoded" in encoder.errors[0]


async def test_a_failed_step_leaves_the_embedding_where_it_was(
    seeing: Callable[[str], Seeing], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeing(ONE)
    async with AsyncEngine(make_config(model)) as engine:
        decoder = executor_of(engine)._model.decoder
        if not isinstance(decoder, WholeDecoder):
            pytest.skip("the kernels of this CPU have no compiled loop")
        table = decoder._struct.embedding
        with monkeypatch.context() as patch:
            patch.setattr(decoder._kernels, "decode", None)
            with pytest.raises(RequestFailedError):
                await collect(engine, model.mark, [picture(1, 8, 8)])
        assert decoder._struct.embedding == table
        assert await collect(engine, "Nothing", []) == model.tokens("Nothing", [])


async def test_what_comes_without_its_arrays_is_refused_and_fails_nobody(
    seeing: Callable[[str], Seeing],
) -> None:
    model = seeing("qwen2_5_vl")
    bare = Encoded([5] * 9, [EncoderInput(0, 4, "X")])
    async with AsyncEngine(make_config(model)) as engine:
        found = await asyncio.gather(
            collect(engine, *model.prompts()[0]), engine.add_request(bare), return_exceptions=True
        )
    assert found[0] == model.tokens(*model.prompts()[0])
    assert isinstance(found[1], RequestError)
    assert found[1].param == "encoder_inputs[0]"
    assert "without pixel_values, image_grid_thw" in str(found[1])


def in_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


@pytest.mark.parametrize("fused", [True, False])
async def test_adapters_are_for_the_text_part(
    seeing: Callable[[str], Seeing], fused: bool, tmp_path: Path
) -> None:
    from transformers import AutoModelForImageTextToText

    model = seeing(ONE)
    text = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    adapter = make_adapter(model.path, tmp_path / "text", targets=text)
    adapted = copy.copy(model)
    merged = merge(model.path, adapter, tmp_path / "merged")
    adapted.model = AutoModelForImageTextToText.from_pretrained(merged).eval()
    config = make_config(model, **CASES["chunks"], fused=fused)
    config = msgspec.structs.replace(config, adapters=AdapterConfig(lora=(f"text={adapter}",)))
    words, images = model.prompts()[0]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    async with AsyncEngine(config) as engine:
        plain, tokens = await collect(engine, words, images), []
        async for output in engine.generate(
            MultimodalPrompt(words, images), params, adapter="text"
        ):
            tokens += output.token_ids
    assert plain == model.tokens(words, images)
    assert tokens == adapted.tokens(words, images) != plain
    other = make_adapter(model.path, tmp_path / "all", targets=("self_attn.q_proj",))
    config = msgspec.structs.replace(config, adapters=AdapterConfig(lora=(f"all={other}",)))
    with pytest.raises(ConfigError, match=r"no linear layer \S*vision\S* that can have an adapter"):
        async with AsyncEngine(config):
            pass


async def test_a_decision_log_holds_no_image_and_is_replayed_without(
    seeing: Callable[[str], Seeing], tmp_path: Path
) -> None:
    model, path = seeing(ONE), tmp_path / "log"
    config = make_config(model, **CASES["chunks"], decision_log=str(path))
    await serve(config, model.prompts())
    assert path.stat().st_size < 10_000  # the pixels of one alone are more
    result = replay(DecisionLog(path))
    assert result.divergence is None
    assert result.num_requests == len(model.prompts())


async def test_messages_mention_images_as_parts(seeing: Callable[[str], Seeing]) -> None:
    model, image = seeing(ONE), picture(3, 40, 40)
    image_part, text_part = {"type": "image"}, {"type": "text", "text": "What is this?"}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [image_part, text_part]},
    ]
    plain = [{"role": "user", "content": "Hello"}]
    rendered, hello = (
        model.processor.tokenizer.apply_chat_template(
            [{**one, "content": in_parts(one["content"])} for one in given],
            tokenize=False,
            add_generation_prompt=True,
        )
        for given in (messages, plain)
    )
    assert "brief" in rendered
    assert "Hello" in hello
    async with AsyncEngine(make_config(model)) as engine:
        assert await collect(engine, messages, [image]) == model.tokens(rendered, [image])
        assert await collect(engine, plain, []) == model.tokens(hello, [])
        expected = model.processor.tokenizer(hello, add_special_tokens=False)["input_ids"]
        assert await engine.tokenize(plain) == expected
        for content, images, said in (
            ([image_part, image_part], [image], "the messages mention 2 images, and 1 come"),
            ([{"type": "video"}], [image], r"messages\[0\].content\[0\] must be"),
            ([{**text_part, "text": model.mark}, image_part], [image], "mentions 2 images"),
        ):
            with pytest.raises(RequestError, match=said):
                await collect(engine, [{"role": "user", "content": content}], images)


@pytest.mark.parametrize(
    ("image", "said"),
    [
        ("a name", "an image must be one of PIL, or an array"),
        (picture(0, 8, 8).resize((1, 8)).crop((0, 0, 0, 8)), "has no pixels"),
        (picture(0, 201, 1), "an image of 201 x 1 is too narrow"),
        (EncodedImage(bomb(1, 65_535), "images[1]"), "1 x 65535 is too narrow"),  # undecoded
    ],
)
async def test_what_is_no_image_is_refused_by_its_number(
    seeing: Callable[[str], Seeing], image: Any, said: str
) -> None:
    model = seeing(ONE)
    async with AsyncEngine(make_config(model)) as engine:
        with pytest.raises(RequestError, match=said) as raised:
            await collect(engine, model.mark * 2, [picture(0, 8, 8), image])
    assert raised.value.param == "images[1]"


async def test_an_image_of_one_token_is_read_beside_others_and_alone(
    seeing: Callable[[str], Seeing],
) -> None:
    model = seeing("mistral3")
    text, large, small = f"{model.mark} What?", picture(0, 40, 40), picture(0, 9, 16)
    with pytest.raises(RuntimeError, match="split_with_sizes"):  # alone, transformers cannot
        list(model.tokens(text, [small]))
    async with AsyncEngine(make_config(model)) as engine:
        for images in ([large, small], [small, large]):
            tokens = await collect(engine, model.mark + text, images)
            assert tokens == model.tokens(model.mark + text, images)
        assert len(await collect(engine, text, [small])) == NUM_TOKENS


async def test_prompts_too_long_with_their_images_are_refused_unprepared(
    seeing: Callable[[str], Seeing], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeing(ONE)
    async with AsyncEngine(make_config(model)) as engine:
        monkeypatch.setattr(ImageProcessor, "prepare", None)
        with pytest.raises(RequestError, match=r"at least \d+ tokens"):
            await collect(engine, model.mark * 40, [picture(0, 70, 70)] * 40)
        with pytest.raises(RequestError, match="truncate_prompt_tokens cannot be served"):
            await collect(engine, model.mark, [picture(0, 8, 8)], truncate_prompt_tokens=5)


async def test_arrays_and_images_of_other_modes_are_seen_alike(
    seeing: Callable[[str], Seeing],
) -> None:
    import numpy as np
    import torch

    model, image = seeing(ONE), picture(3, 40, 30)
    array = np.asarray(image)
    text = f"{model.mark} What?"
    expected = model.tokens(text, [image])
    async with AsyncEngine(make_config(model)) as engine:
        for same in (array, torch.from_numpy(array.copy()), image.convert("RGBA")):
            assert await collect(engine, text, [same]) == expected
        assert stats_of(engine).num_encoder_inputs == 1
        clear = image.convert("RGBA")
        clear.putalpha(image.convert("L"))
        seen = model.tokens(text, [clear])
        assert await collect(engine, text, [clear]) == seen != expected


async def test_speculation_structure_and_prompt_logprobs_go_with_images(
    seeing: Callable[[str], Seeing],
) -> None:
    model = seeing("qwen2_5_vl")
    text, images = model.prompts()[0]
    config = make_config(model, options={"chunk_size": 16})
    speculation = msgspec.structs.replace(config.speculation, speculative_method="ngram")
    config = msgspec.structs.replace(config, speculation=speculation)
    expected = model.tokens(text, images, 60)
    async with AsyncEngine(config) as engine:
        tokens = await collect(engine, text, images, max_tokens=60)
        params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=0, ignore_eos=True)
        told = []
        async for output in engine.generate(MultimodalPrompt(text, images), params):
            told += output.prompt_logprobs or []
    assert tokens == expected
    given = model.processor(text=[text], images=[images], return_tensors="pt")
    ids = given["input_ids"][0]
    logprobs = model.model(**given).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
    assert [entry.logprob for entry in told[1:]] == pytest.approx(logprobs.tolist(), abs=1e-3)


@pytest.mark.parametrize(
    ("kind", "model", "runner", "said"),
    [
        (
            "qwen3_vl",
            {},
            {"threads": 2, "tensor_parallel_size": 2},
            "no plan for Qwen3VLText",
        ),
    ],
)
@pytest.mark.slow
async def test_what_is_not_served_of_models_that_see_is_refused_at_start(
    seeing: Callable[[str], Seeing],
    kind: str,
    model: dict[str, Any],
    runner: dict[str, Any],
    said: str,
) -> None:
    config = make_config(seeing(kind))
    config = msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, **model),
        runner=msgspec.structs.replace(config.runner, **runner),
    )
    with pytest.raises(ConfigError, match=said):
        async with AsyncEngine(config):
            pass


async def test_without_its_processor_a_model_that_sees_serves_text(
    seeing: Callable[[str], Seeing], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = seeing(ONE)
    shutil.copytree(model.path, tmp_path / "blind")
    (tmp_path / "blind" / "preprocessor_config.json").unlink()
    config = make_config(model)
    blind = msgspec.structs.replace(config.model, model=str(tmp_path / "blind"))
    async with AsyncEngine(msgspec.structs.replace(config, model=blind)) as engine:
        assert await collect(engine, "Nothing", []) == model.tokens("Nothing", [])
        with pytest.raises(RequestError, match="cannot read the image processor of"):
            await collect(engine, model.mark, [picture(0, 8, 8)])
        assert "cannot read the image processor of" in engine.media.refuses_images
    assert "images are refused" in caplog.text


@pytest.mark.slow
async def test_tokens_of_llama_4_on_two_ranks_are_those_of_generate(
    seeing: Callable[[str], Seeing],
) -> None:
    model = seeing("llama4")
    prompts = model.prompts()
    config, runner = on_ranks(make_config(model, **CASES["pieces"]), 2)
    with loading_one_at_a_time():
        async with AsyncEngine(config, runner=runner) as engine:
            tokens = await asyncio.gather(*(collect(engine, *prompt) for prompt in prompts))
    assert tokens == [model.tokens(text, images) for text, images in prompts]
