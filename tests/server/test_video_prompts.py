"""Videos from the HTTP door to a model that reads them: a tiny one of random weights."""

import base64
import io
import json
import re
import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from aioserve import MultimodalPrompt, SamplingParams, Video
from aioserve.config import (
    CacheConfig,
    EngineConfig,
    ImageConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
)
from aioserve.engine import Conversation
from aioserve.features.multimodal import decoding
from aioserve.server.app import listening
from aioserve.server.sockets import bind
from tests.multimodal.pictures import bomb, data_url, encoded
from tests.seeing_models import make_seeing_model, picture
from tests.server.bad_bodies import check, mutations, thinned
from tests.server.serving import running
from tests.workers.joined import connected

# The loop is the subject of other tests; these load a model each.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

PATH = "/v1/chat/completions"
NUM_TOKENS = 8
TEXT = {"type": "text", "text": "What happens?"}
JSON = {"Content-Type": "application/json"}
ASKED = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing_model(request.param, tmp_path_factory.mktemp(request.param))


def config_of(model: Path, images: dict | None = None, **scheduler: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(model), served_model_name="seer", dtype="float32"),
        cache=CacheConfig(num_kv_blocks=200, block_size=16),
        runner=RunnerConfig(threads=1),
        scheduler=SchedulerConfig(**scheduler),
        images=ImageConfig(**images or {}),
    )


FRAMES = [picture(i, 60, 40) for i in range(5)]
IMAGE = picture(9, 40, 40)


def url_of(*files: bytes) -> str:
    frames = files or [encoded(frame) for frame in FRAMES]
    return "data:video/jpeg;base64," + ",".join(base64.b64encode(each).decode() for each in frames)


def video_part(url: str | None = None, **more: Any) -> dict:
    return {"type": "video_url", "video_url": {"url": url or url_of()}, **more}


def image_part() -> dict:
    return {"type": "image_url", "image_url": {"url": data_url(encoded(IMAGE))}}


async def ask(server: Any, *parts: dict, path: str = PATH) -> Any:
    asked = ASKED if path == PATH else {}
    body = {"messages": [{"role": "user", "content": [TEXT, *parts]}], **asked}
    data = io.BytesIO(json.dumps(body).encode())  # some are of more than a MiB
    return await server.request("POST", path, data=data, headers=JSON)


async def ids_of(server: Any, *parts: dict) -> list[int]:
    answer = await ask(server, *parts)
    assert answer.status == 200, answer.body
    return answer.json()["choices"][0]["token_ids"]


async def seen_by_engine(server: Any, images: list, *videos: Video) -> tuple[list[int], int]:
    """Tokens of the reply, and of the prompt, as a caller of the engine gets them."""
    kinds = [*(["video"] * len(videos)), *(["image"] * len(images))]
    content = [TEXT, *({"type": kind} for kind in kinds)]
    talk = Conversation([{"role": "user", "content": content}])
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    tokens: list[int] = []
    async for output in server.engine.generate(MultimodalPrompt(talk, images, videos), params):
        tokens += output.token_ids
    return tokens, output.num_prompt_tokens


async def test_a_video_is_shown_as_the_engine_would_show_it(model):
    async with running(config_of(model)) as server:
        [card] = (await server.get("/v1/models")).json()["data"]
        assert card["architecture"]["input_modalities"] == ["text", "image", "video"]
        slow, num_prompt_tokens = await seen_by_engine(server, [IMAGE], Video(FRAMES, 0.7))
        usual, _ = await seen_by_engine(server, [IMAGE], Video(FRAMES))
        assert await ids_of(server, video_part(fps=0.7), image_part()) == slow != usual
        assert await ids_of(server, video_part(), image_part()) == usual
        assert await ids_of(server, video_part(fps=2), image_part()) == usual
        counted = await ask(server, video_part(fps=0.7), image_part(), path="/tokenize")
        assert counted.json()["count"] == num_prompt_tokens
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            said: Any = [TEXT, video_part(), image_part()]
            chat = await client.chat.completions.create(
                model="seer",
                messages=[{"role": "user", "content": said}],
                extra_body=ASKED,
            )
            assert chat.choices[0].token_ids == usual


async def test_a_worker_hands_over_the_videos_that_it_has_prepared(model):
    sockets = bind("127.0.0.1", 0)
    parts = [video_part(fps=1.1), image_part(), video_part()]
    async with (
        running(config_of(model, policy="fcfs", max_encoder_tokens=200)) as server,
        connected(server.engine, 1) as (_, [remote], _),
        listening(remote, sockets) as url,
    ):
        told = await ids_of(server, *parts)
        server.url = url
        assert await ids_of(server, *parts) == told
        num_videos = 5 if "qwen2" in model.name else 12  # whose frames have more tokens
        error = check(await ask(server, *[video_part()] * num_videos))
        assert re.fullmatch(r"messages\[0\]\.content\[\d+\]\.video_url\.url", error["param"])
        assert f"{error['param']} does not fit: it has, with those before" in error["message"]


GOOD = encoded(FRAMES[0])
WHERE = "messages[0].content[2].video_url.url"
BAD = {
    "a file": (video_part("data:video/mp4;base64,AAAA"), WHERE, "data:video/jpeg;base64,FRAME,"),
    "a URL": (video_part("https://example.com/video.mp4"), WHERE, "files of videos are not read"),
    "no image": (video_part(url_of(GOOD, b"none")), WHERE, "frame 1: these bytes are no image"),
    "cut off": (video_part(url_of(GOOD, GOOD[:-900])), WHERE, "frame 1: the image cannot be dec"),
    "bomb": (video_part(url_of(bomb(), GOOD)), WHERE, "frame 0: the image is too large"),
    "pixels": (video_part(url_of(GOOD, bomb(3000, 3000))), WHERE, "3000 x 3000 pixels"),
    "sizes": (video_part(url_of(GOOD, encoded(IMAGE))), WHERE, "must be of one size: frame 1 is"),
    "narrow": (video_part(url_of(*[encoded(picture(0, 201, 1))] * 2)), WHERE, "too narrow"),
    "no frame": (video_part("data:video/jpeg;base64,"), WHERE, "frame 0: these bytes are no"),
    "many": (video_part(url_of(*[GOOD] * 7)), WHERE, "more than 9 frames together"),
    "bytes": (video_part(url_of(GOOD, b"x" * 2**20)), WHERE, "more than 1 MiB together"),
    "rate": (video_part(fps=0), "messages[0].content[2].fps", "fps must be a number from 0.001"),
    "missing": ({"type": "video_url"}, "messages[0].content[2].video_url", "is missing"),
    "of text": ({**TEXT, "fps": 2}, "messages[0].content[2].fps", "is not supported"),
}


async def test_what_is_wrong_with_a_video_is_refused_by_its_part(model):
    images = {"max_video_frames": 9, "max_image_mib": 1, "max_image_megapixels": 5}
    few = video_part(url_of(GOOD, GOOD, GOOD))
    async with running(config_of(model, images)) as server:
        for what, (part, where, said) in BAD.items():
            error = check(await ask(server, few, part))
            assert (error["param"], said in error["message"]) == (where, True), (what, error)
        assert len(await ids_of(server, few)) == NUM_TOKENS
        assert (await ask(server, few, {**TEXT, "fps": None})).status == 200


async def test_a_model_that_reads_no_videos_says_so(tmp_path):
    async with running(config_of(make_seeing_model("idefics3", tmp_path))) as server:
        error = check(await ask(server, video_part()))
        assert error["param"] == "messages[0].content[1].video_url.url"
        assert "this model reads no videos" in error["message"]


async def test_frames_are_decoded_off_the_loop(model, monkeypatch):
    threads: dict[str, set[threading.Thread]] = {}
    for name, module in (
        ("decode", decoding),
        ("read_header", decoding),
        ("read_frames", "aioserve.features.multimodal.bodies"),
    ):
        place = module if isinstance(module, str) else module.__name__
        work = getattr(__import__(place, fromlist=[name]), name)

        def noting(*args, name=name, work=work):
            threads.setdefault(name, set()).add(threading.current_thread())
            return work(*args)

        monkeypatch.setattr(f"{place}.{name}", noting)
    async with running(config_of(model)) as server:
        assert len(await ids_of(server, video_part())) == NUM_TOKENS
    assert threads.keys() == {"decode", "read_header", "read_frames"}
    assert threading.main_thread() not in set().union(*threads.values())


async def test_a_video_with_anything_wrong_in_it_is_answered_all_the_same(model):
    """With 200 or with a refusal, never with a failure."""
    async with running(config_of(model)) as server:
        for wrong in thinned(mutations([video_part(fps=2.0)])):
            if not isinstance(wrong, list) or not all(isinstance(part, dict) for part in wrong):
                continue
            answer = await ask(server, *wrong)
            assert answer.status in (200, 400), (wrong, answer)
            if answer.status != 200:
                check(answer, answer.status)
