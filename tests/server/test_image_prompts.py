"""Images from the HTTP door to a model that reads them: a tiny one of random weights."""

import asyncio
import gc
import io
import threading
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from aiohttp import web
from aioserve.policies.fcfs import FCFSScheduler

from aioserve import AsyncClient, MultimodalPrompt, SamplingParams
from aioserve.apis.responses.protocol import InputItem
from aioserve.config import (
    AccessConfig,
    CacheConfig,
    EngineConfig,
    ImageConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
)
from aioserve.engine import Conversation
from aioserve.features.multimodal import decoding, fetching
from aioserve.features.multimodal import prompt as processing
from aioserve.request import WaitReason
from aioserve.scheduler import SchedulerOutput
from aioserve.server.app import listening
from aioserve.server.chat.protocol import ContentPart
from aioserve.server.sockets import bind
from tests.multimodal.pictures import bomb, data_url, encoded
from tests.policy_names import SHIPPED
from tests.processes import PATIENCE
from tests.seeing_models import SEEING_KINDS, make_seeing_model, picture
from tests.server.access.conftest import BEN, keys_file
from tests.server.bad_bodies import check, mutations, thinned
from tests.server.serving import running
from tests.server.test_images import DOORS, TEXT, ask, chat_part, names
from tests.slow import mostly_slow
from tests.workers.joined import connected

# The loop is the subject of other tests; these load a model each.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

__all__ = ["keys_file"]  # a fixture

NUM_TOKENS = 8
ROOM = {"max_encoder_tokens": 64, "encoder_cache_tokens": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing_model("idefics3", tmp_path_factory.mktemp("idefics3"))


def config_of(model: Path, *, images: dict | None = None, blocks: int = 200, **scheduler):
    return EngineConfig(
        model=ModelConfig(model=str(model), served_model_name="seer", dtype="float32"),
        cache=CacheConfig(num_kv_blocks=blocks, block_size=16),
        runner=RunnerConfig(threads=1),
        scheduler=SchedulerConfig(**{**ROOM, **scheduler}),
        images=ImageConfig(**images or {}),
    )


@pytest.fixture
def seeing(model):
    """`async with seeing(policy=...) as server:`"""
    return lambda **settings: running(config_of(model, **settings))


def url_of(seed: int, width: int = 60, height: int = 40) -> str:
    return data_url(encoded(picture(seed, width, height)))


async def look(server, *urls: str, **fields: Any) -> dict:
    """The answer to a chat whose one message is a text and these images; asserts that it is one."""
    body = {
        "messages": [{"role": "user", "content": [TEXT, *map(chat_part, urls)]}],
        **{
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        },
        **fields,
    }
    answer = await server.request("POST", "/v1/chat/completions", json=body)
    assert answer.status == 200, answer.body
    return answer.json()


def ids_of(answer: dict) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


async def metric(server, name: str) -> float:
    lines = (await server.get("/metrics")).body.decode().splitlines()
    return float(dict(line.rsplit(" ", 1) for line in lines)[f"aioserve_{name}"])


async def seen_by_engine(server, *images: Any) -> tuple[list[int], int]:
    """Tokens of the reply, and of the prompt, as a caller of the engine gets them."""
    parts = [TEXT, *({"type": "image"} for _ in images)]
    prompt = MultimodalPrompt(Conversation([{"role": "user", "content": parts}]), images)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    tokens: list[int] = []
    async for output in server.engine.generate(prompt, params):
        tokens += output.token_ids
    return tokens, output.num_prompt_tokens


async def test_every_door_shows_the_model_what_the_engine_would(seeing):
    images = [picture(0, 60, 40), picture(1, 30, 50)]
    urls = [data_url(encoded(image)) for image in images]
    async with seeing() as server:
        [card] = (await server.get("/v1/models")).json()["data"]
        assert card["architecture"]["input_modalities"] == ["text", "image"]
        assert "vision" in card["capabilities"]
        tokens, num_prompt_tokens = await seen_by_engine(server, *images)
        assert (await seen_by_engine(server, images[0], images[0]))[0] != tokens
        answer = await look(server, *urls)
        assert ids_of(answer) == [tokens]
        assert answer["usage"]["prompt_tokens"] == num_prompt_tokens
        text = answer["choices"][0]["message"]["content"]
        blocks = [
            {
                "type": "image",
                "source": {
                    "type": "base64",
                    "media_type": "image/png",
                    "data": url.partition(",")[2],
                },
            }
            for url in urls
        ]
        talk = {"messages": [{"role": "user", "content": [TEXT, *blocks]}]}
        limits = {"max_tokens": NUM_TOKENS, "temperature": 0}
        message = await server.request("POST", "/v1/messages", json={**talk, **limits})
        assert message.json()["content"][0]["text"] == text
        counted = await server.request("POST", "/v1/messages/count_tokens", json=talk)
        assert counted.json() == {"input_tokens": num_prompt_tokens}
        tokenized = await ask(server, "tokenize", *urls)
        assert tokenized.json()["count"] == num_prompt_tokens
        path, body, part, _ = DOORS["responses"]
        asked = body([part(url) for url in urls]) | {"temperature": 0}
        response = (await server.request("POST", path, json=asked)).json()
        assert response["output"][0]["content"][0]["text"].startswith(text)
        assert response["usage"]["input_tokens"] == num_prompt_tokens
        went_on = {"previous_response_id": response["id"], "input": "And?", "max_output_tokens": 16}
        after = (await server.request("POST", path, json=went_on)).json()
        assert after["usage"]["input_tokens"] > num_prompt_tokens + 16
        listed = (await server.get(f"/v1/responses/{response['id']}/input_items")).json()
        assert [part.get("image_url") for part in listed["data"][0]["content"]] == [None, *urls]
        async with AsyncClient(server.url) as client:
            params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
            said = [TEXT, *map(chat_part, urls)]
            deltas = [o async for o in client.chat([{"role": "user", "content": said}], params)]
            assert "".join(delta.text for delta in deltas) == text
        assert await metric(server, "encoder_inputs_total") == 2


async def test_the_clients_of_openai_and_anthropic_send_images(seeing):
    import anthropic

    url = url_of(0)
    async with seeing() as server:
        text = (await look(server, url))["choices"][0]["message"]["content"]
        base, said = server.url + "/v1", [TEXT, chat_part(url)]
        async with openai.AsyncOpenAI(base_url=base, api_key="none") as client:
            chat = await client.chat.completions.create(
                model="seer",
                messages=[{"role": "user", "content": said}],
                max_tokens=NUM_TOKENS,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            assert chat.choices[0].message.content == text
            parts = [
                {"type": "input_text", "text": TEXT["text"]},
                {"type": "input_image", "image_url": url, "detail": "auto"},
            ]
            response = await client.responses.create(
                model="seer",
                input=[{"role": "user", "content": parts}],
                max_output_tokens=16,
                temperature=0,
            )
            assert response.output_text.startswith(text)
            parts[1]["image_url"] = data_url(b"none")
            with pytest.raises(openai.BadRequestError) as raised:
                await client.responses.create(
                    model="seer", input=[{"role": "user", "content": parts}]
                )
            assert raised.value.param == "input[0].content[1].image_url"
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none") as client:
            source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
            message = await client.messages.create(
                model="seer",
                messages=[{"role": "user", "content": [TEXT, {"type": "image", "source": source}]}],
                max_tokens=NUM_TOKENS,
                extra_body={"temperature": 0},
            )
            assert message.content[0].text == text


async def test_an_image_of_ten_requests_is_encoded_once(seeing):
    async with seeing() as server:
        one, *others = await asyncio.gather(
            *(look(server, url_of(0), user=f"{i}", cache_salt=f"{i}") for i in range(10))
        )
        assert all(ids_of(other) == ids_of(one) for other in others)
        assert await metric(server, "encoder_inputs_total") == 1
        assert await metric(server, "encoder_cache_hits_total") == 9
        tokens = await metric(server, "encoder_tokens_total")
        assert tokens == await metric(server, "encoder_cache_used_tokens") > 4
        two = await look(server, url_of(0), n=2)
        assert ids_of(two) == ids_of(one) * 2
        assert await metric(server, "encoder_inputs_total") == 1


URLS = [(0,), (1, 2), (), (3,)]


async def look_at_all(server, num_tokens: int = NUM_TOKENS) -> list:
    """Requests with one image, two, none and one, together."""
    looks = (look(server, *map(url_of, seeds), max_tokens=num_tokens) for seeds in URLS)
    return [ids_of(answer)[0] for answer in await asyncio.gather(*looks)]


@pytest.fixture(scope="module")
def alone(model):
    """The first tokens that each of them gets without the others, under a roomy `fcfs`."""

    async def get() -> list:
        async with running(config_of(model, policy="fcfs")) as server:
            return [
                ids_of(await look(server, *map(url_of, seeds), max_tokens=60))[0] for seeds in URLS
            ]

    whole = asyncio.run(get())
    return lambda num_tokens=NUM_TOKENS: [ids[:num_tokens] for ids in whole]


@pytest.mark.parametrize("policy", mostly_slow(SHIPPED, but=["fcfs", "deadline"]))
async def test_under_every_policy_the_tokens_are_the_same(seeing, alone, policy):
    async with seeing(policy=policy) as server:
        assert await look_at_all(server) == alone()


class BeginsWithAll(FCFSScheduler):
    """So that what comes then does not depend on who was first."""

    has_begun: bool

    def schedule(self) -> SchedulerOutput:
        cls = type(self)
        cls.has_begun = cls.has_begun or len(self.waiting) == len(URLS)
        return super().schedule() if cls.has_begun else self.new_step().output()


@pytest.mark.parametrize(
    "settings",
    [{"pipeline_depth": 2}, {"options": {"chunk_size": 7}, "encoder_cache_tokens": 32}],
    ids=["two steps in flight", "little room for images"],
)
async def test_whatever_the_room_the_tokens_are_the_same(seeing, alone, settings):
    async with seeing(policy="chunked_prefill", **settings) as server:
        assert await look_at_all(server) == alone()


async def test_images_of_who_gave_way_are_there_when_it_goes_on(seeing, alone):
    """All prompts have 15 blocks together, and grow by 15 more."""
    BeginsWithAll.has_begun = False
    async with seeing(policy=f"{__name__}:BeginsWithAll", blocks=14) as server:
        assert await look_at_all(server, 60) == alone(60)
        assert await metric(server, "preemptions_total") > 0


class NotingScheduler(BeginsWithAll):
    """Notes who waits why, and what the encoder is told."""

    reasons: set[WaitReason]
    num_encoded: int
    freed: set[str]

    def schedule(self) -> SchedulerOutput:
        cls = type(self)
        output = super().schedule()
        cls.reasons |= {request.wait_reason for request in self.waiting}
        cls.num_encoded += sum(map(len, output.scheduled_encoder_inputs.values()))
        cls.freed |= set(output.free_encoder_hashes)
        return output


FILES = {
    "one pixel": encoded(picture(0, 1, 1)),
    "as narrow as may be": encoded(picture(0, 1, 200)),
    "wide": encoded(picture(0, 4000, 20)),
    "gray with alpha": encoded(picture(0, 40, 30).convert("LA")),
    "transparent palette": encoded(picture(0, 40, 30).quantize(16), transparency=3),
    "CMYK": encoded(picture(0, 40, 30).convert("CMYK"), "JPEG"),
    "bilevel": encoded(picture(0, 40, 30).convert("1"), "BMP"),
    "moving": encoded(
        picture(0, 40, 30), "WEBP", save_all=True, append_images=[picture(1, 40, 30)]
    ),
}


async def test_files_of_every_kind_and_size_are_shown_as_transformers_loads_them(seeing):
    from PIL import Image
    from transformers.image_utils import load_image

    async with seeing() as server:
        for what, data in FILES.items():
            image = load_image(Image.open(io.BytesIO(data)))
            tokens, _ = await seen_by_engine(server, image)
            assert ids_of(await look(server, data_url(data))) == [tokens], what


async def test_who_waits_for_the_encoder_says_so_and_what_nobody_needs_is_freed(seeing, alone):
    NotingScheduler.reasons, NotingScheduler.num_encoded = set(), 0
    NotingScheduler.freed, NotingScheduler.has_begun = set(), False
    async with seeing(policy=f"{__name__}:NotingScheduler") as server:
        assert await look_at_all(server) == alone()
        assert NotingScheduler.num_encoded == await metric(server, "encoder_inputs_total")
    assert WaitReason.ENCODER_BUDGET in NotingScheduler.reasons
    assert NotingScheduler.num_encoded >= 4
    assert len(NotingScheduler.freed) >= 2


@pytest.mark.parametrize("kind", mostly_slow(SEEING_KINDS, but=SEEING_KINDS[:1]))
async def test_a_worker_hands_over_what_it_has_processed(kind, tmp_path):
    """Whatever arrays the family has."""
    sockets = bind("127.0.0.1", 0)
    async with (
        running(config_of(make_seeing_model(kind, tmp_path / kind))) as server,
        connected(server.engine, 1) as (_, [remote], _),
        listening(remote, sockets) as url,
    ):
        told = await look_at_all(server)
        server.url = url
        assert await look_at_all(server) == told
        answer = await ask(server, "chat", data_url(b"none"))
        assert "no image" in names(answer, "chat", 0)


BAD = {
    "no image": (data_url(b"none"), "these bytes are no image"),
    "cut off": (data_url(encoded(picture(0, 200, 200))[:-3000]), "cannot be decoded"),
    "bomb": (data_url(bomb()), "the image is too large"),
    "many pixels": (data_url(bomb(3000, 3000)), "3000 x 3000 pixels"),
    "private": ("http://127.0.0.1:9/image.png", "cannot be reached at a public address"),
    "large": (url_of(0, 96, 96), "the smaller of max_encoder_tokens and encoder_cache_tokens is"),
}


async def test_what_is_wrong_with_an_image_is_a_400_that_names_its_part(seeing):
    limits, good = {"max_encoder_tokens": 25, "encoder_cache_tokens": 25}, url_of(1, 200, 20)
    images = {"image_urls": True, "max_image_megapixels": 8}
    async with seeing(images=images, **limits) as server:
        for door in (door for door in DOORS if door != "results"):
            for what, (url, message) in BAD.items():
                if what == "large" and door in ("tokenize", "count_tokens"):
                    continue
                if url.startswith("data:") and DOORS[door][2]("").get("type") == "image":
                    continue  # a source of type url may be a data: URL as well, tried below
                answer = await ask(server, door, good, url)
                assert message in names(answer, door, 1), (door, what)
            answer = await ask(server, door, *["data:image/png;base64,AAAA"] * 10_000)
            assert "one image too many" in names(answer, door, 16)
        assert await metric(server, "encoder_inputs_total") == 0
        assert (await look(server, good))["usage"]["completion_tokens"] == NUM_TOKENS


@pytest.mark.parametrize("limit", ["key", "queue"])
async def test_images_that_are_being_fetched_count(model, keys_file, monkeypatch, limit):
    monkeypatch.setattr(fetching, "is_public", lambda address: True)
    is_asked, may_answer = asyncio.Event(), asyncio.Event()

    async def show(request: web.Request) -> web.Response:
        is_asked.set()
        await may_answer.wait()
        return web.Response(body=encoded(picture(0, 60, 40)), content_type="image/png")

    app = web.Application()
    app.router.add_get("/image", show)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/image"
    images, headers = {"image_urls": True, "image_timeout": 3600.0}, {}
    if limit == "key":
        config, code = config_of(model, images=images), "rate_limit_exceeded"
        keys_file.write_text(keys_file.read_text().replace(", tokens_per_minute: 200", ""))
        config = msgspec.structs.replace(config, access=AccessConfig(api_keys_file=str(keys_file)))
        headers["Authorization"] = f"Bearer {BEN}"  # who may have one request at once
    else:
        config = config_of(model, images=images, max_waiting_requests=1)
        code = "engine_overloaded"
    try:
        async with running(config) as server:
            server.session.headers.update(headers)
            counting = ("tokenize", "count_tokens")
            pairs = [("chat", "chat"), *((door, "chat") for door in counting)]
            for first, second in (*pairs, *(("chat", door) for door in counting)):
                is_asked.clear()
                may_answer.clear()
                looking = asyncio.create_task(ask(server, first, url))
                await is_asked.wait()
                refused = await ask(server, second, url_of(1))
                is_theirs = second == "count_tokens"  # Anthropic's: another status, and no code
                error = check(refused, 529 if is_theirs and limit == "queue" else 429)
                assert error.get("code", code) == code
                may_answer.set()
                assert (await looking).status == 200
    finally:
        may_answer.set()
        await runner.cleanup()


async def test_a_redirect_to_a_private_address_is_refused(seeing, monkeypatch):
    monkeypatch.setattr(fetching, "is_public", lambda address: str(address) == "127.0.0.1")

    async def send_on(request: web.Request) -> web.Response:
        raise web.HTTPFound(f"http://127.0.0.2:{request.url.port}/image")

    async def show(request: web.Request) -> web.Response:
        return web.Response(body=encoded(picture(0, 60, 40)), content_type="image/png")

    app = web.Application()
    app.router.add_get("/image", show)
    app.router.add_get("/elsewhere", send_on)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", 0).start()
    host = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with seeing(images={"image_urls": True}) as server:
            answer = await ask(server, "chat", f"{host}/elsewhere")
            assert "cannot be reached at a public address" in names(answer, "chat", 0)
            assert ids_of(await look(server, f"{host}/image")) == ids_of(
                await look(server, url_of(0))
            )
    finally:
        await runner.cleanup()


async def test_without_pillow_the_text_is_served_and_an_image_names_what_to_install(
    seeing, monkeypatch
):
    monkeypatch.setattr(processing, "find_spec", lambda name: None)
    async with seeing() as server:
        assert ids_of(await look(server))
        answer = await ask(server, "chat", url_of(0))
        assert "pip install pillow num2words" in names(answer, "chat", 0)


async def test_images_of_requests_are_bounded_in_memory_and_let_go_at_their_end(seeing):
    async with seeing(images={"image_memory_gib": 1e-6}) as server:
        body = {
            "messages": [{"role": "user", "content": [TEXT, chat_part(url_of(0))]}],
            "max_tokens": 400,
            "ignore_eos": True,
            "stream": True,
        }
        url = f"{server.url}/v1/chat/completions"
        async with server.session.post(url, json=body) as response:
            await response.content.readany()  # it runs
            await server.engine.pause()  # and does not end meanwhile
            refused = await server.request("POST", "/v1/chat/completions", json=body)
            await server.engine.resume()
            assert check(refused, 429)["message"].startswith("prepared images of requests take")
            assert "Retry-After" in refused.headers
            assert ids_of(await look(server))  # text needs none of it
        body |= {"max_tokens": 2, "stream": False}
        statuses = [429]
        while statuses[-1] == 429:  # until a step has told the runner of the end
            answer = await server.request("POST", "/v1/chat/completions", json=body)
            statuses.append(answer.status)
        assert statuses[-1] == 200


@pytest.mark.slow
@pytest.mark.parametrize("door", ["chat", "responses"])
async def test_what_was_sent_of_an_image_is_let_go_once_it_is_prepared(seeing, door):
    path, body_of, part, _ = DOORS[door]
    long = {"max_tokens": 400, "ignore_eos": True}
    if door == "responses":
        long = {"max_output_tokens": 400, "store": False}
    body = body_of([part(url_of(0))]) | {"stream": True, **long}

    def sent() -> list[object]:
        gc.collect()
        kinds = (decoding.EncodedImage, ContentPart, InputItem)
        return [it for it in gc.get_objects() if type(it) in kinds]

    async with seeing() as server:
        url = f"{server.url}{path}"
        of_others = sent()  # held, by other tests as well
        known = {id(it) for it in of_others}
        async with server.session.post(url, json=body) as response:
            assert response.status == 200
            await response.content.readany()  # it runs
            assert not [it for it in sent() if id(it) not in known]
            response.close()


async def test_what_takes_long_is_done_off_the_loop(seeing, monkeypatch):
    threads: dict[str, set[threading.Thread]] = {}
    for name in ("decode", "decode_base64", "read_header"):
        work = getattr(decoding, name)

        def noting(*args, name=name, work=work):
            threads.setdefault(name, set()).add(threading.current_thread())
            return work(*args)

        monkeypatch.setattr(decoding, name, noting)
        monkeypatch.setattr(f"aioserve.features.multimodal.bodies.{name}", noting, raising=False)
    async with seeing() as server:
        await look(server, url_of(0))
    assert threads.keys() == {"decode", "decode_base64", "read_header"}
    assert threading.main_thread() not in set().union(*threads.values())


async def test_long_texts_are_tokenized_beside_images(seeing, monkeypatch):
    """In another thread, with the same tokenizer: no text waits for an image."""
    begun, may_end = threading.Event(), threading.Event()
    decode = decoding.decode

    def slow(data: bytes) -> Any:
        begun.set()
        assert may_end.wait(PATIENCE)
        return decode(data)

    monkeypatch.setattr(decoding, "decode", slow)
    long = [{"type": "text", "text": "to be or not to be, " * 110}]
    async with seeing() as server:
        looking = asyncio.create_task(look(server, url_of(0)))
        await asyncio.to_thread(begun.wait)
        body = {"messages": [{"role": "user", "content": long}], "max_tokens": 2}
        answer = await server.request("POST", "/v1/chat/completions", json=body)
        assert (answer.status, looking.done()) == (200, False)
        may_end.set()
        assert ids_of(await looking)
        both = (
            look(server, url_of(number))
            if number % 2
            else server.request("POST", "/v1/chat/completions", json=body)
            for number in range(40)
        )
        assert len(await asyncio.gather(*both)) == 40


async def test_a_mark_of_images_in_a_text_is_no_image(seeing):
    async with seeing() as server:
        said = [TEXT | {"text": "<image>?"}, chat_part(url_of(0))]
        body = {"messages": [{"role": "user", "content": said}], "max_tokens": 2}
        answer = await server.request("POST", "/v1/chat/completions", json=body)
        assert "mentions 2 images" in check(answer)["message"]
        assert check(answer)["param"] == "messages"
        said.pop()
        answer = await server.request("POST", "/v1/chat/completions", json=body)
        assert answer.status == 200


async def test_a_part_with_anything_wrong_in_it_is_answered_all_the_same(seeing):
    """With 200 or with a refusal, never with a failure."""
    async with seeing(images={"image_urls": True}) as server:
        for path, body, part, _ in DOORS.values():
            parts = [part(url_of(0, 200, 20))]
            if path == "/v1/messages":
                data = url_of(1, 200, 20).partition(",")[2]
                source = {"type": "base64", "media_type": "image/png", "data": data}
                parts = [{"type": "image", "source": source}]
            for wrong in thinned(mutations(parts)):
                if not isinstance(wrong, list):
                    continue
                answer = await server.request("POST", path, json=body(wrong))
                assert answer.status in (200, 400), (wrong, answer)
                if answer.status != 200:
                    check(answer, answer.status)
