"""Images at the doors: which parts bring them, and what is refused before a model sees any."""

import asyncio
import contextlib

import numpy as np
import pytest
from aiohttp import web

from aioserve.config import ImageConfig
from aioserve.engine import Conversation
from aioserve.engine.prompt import MultimodalPrompt
from aioserve.errors import EngineOverloadedError, RequestError
from aioserve.features.multimodal import fetching
from aioserve.server.images import ImageParts, Images, joined
from tests.multimodal.pictures import bomb, data_url, encoded, picture
from tests.processes import PATIENCE
from tests.server.bad_bodies import check

TALK = Conversation([{"role": "user", "content": "?"}])
TEXT = {"type": "text", "text": "What is it?"}


def chat_part(url):
    return {"type": "image_url", "image_url": {"url": url}}


def block(url):
    return {"type": "image", "source": {"type": "url", "url": url}}


def input_part(url):
    return {"type": "input_image", "image_url": url, "detail": "high"}


#: Of a route with images: its path, a body of these parts, what its parts are, and what of one is
#: named. On Anthropic's the message says it.
DOORS = {
    "chat": (
        "/v1/chat/completions",
        lambda parts: {"messages": [{"role": "user", "content": [TEXT, *parts]}], "max_tokens": 4},
        chat_part,
        "messages[0].content[{}].image_url.url",
    ),
    "tokenize": (
        "/tokenize",
        lambda parts: {"messages": [{"role": "user", "content": [TEXT, *parts]}]},
        chat_part,
        "messages[0].content[{}].image_url.url",
    ),
    "messages": (
        "/v1/messages",
        lambda parts: {"messages": [{"role": "user", "content": [TEXT, *parts]}], "max_tokens": 4},
        block,
        "messages[0].content[{}].source.url",
    ),
    "count_tokens": (
        "/v1/messages/count_tokens",
        lambda parts: {"messages": [{"role": "user", "content": [TEXT, *parts]}]},
        block,
        "messages[0].content[{}].source.url",
    ),
    "results": (
        "/v1/messages",
        lambda parts: {
            "messages": [
                {"role": "user", "content": "?"},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t", "content": [TEXT, *parts]}
                    ],
                },
            ],
            "max_tokens": 4,
        },
        block,
        "messages[2].content[0].content[{}].source.url",
    ),
    "responses": (
        "/v1/responses",
        lambda parts: {
            "input": [{"role": "user", "content": [{**TEXT, "type": "input_text"}, *parts]}],
            "max_output_tokens": 16,
        },
        input_part,
        "input[0].content[{}].image_url",
    ),
}


async def ask(server, door, *urls):
    """Sends texts and images of `urls` to that door."""
    path, body, part, _ = DOORS[door]
    return await server.request("POST", path, json=body([part(url) for url in urls]))


def names(answer, door, i):
    """The error's message, which names the `i`-th image of what `ask` sent."""
    error, where = check(answer), DOORS[door][3].format(i + 1)
    assert error.get("param", where) == where
    assert where in error["message"]
    return error["message"]


async def test_an_image_for_a_text_model_is_refused_and_nothing_is_fetched(
    start_server, monkeypatch
):
    monkeypatch.setattr(fetching, "is_public", None)  # whoever asks fails
    async with start_server(images={"image_urls": True}) as server:
        for door in DOORS:
            answer = await ask(server, door, "http://127.0.0.1/image", data_url())
            assert "this model reads no images" in names(answer, door, 0)


NOT_SHOWN = [
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [chat_part("x") | {"text": "y"}]}]},
        "messages[0].content[0].text",
    ),
    *(
        (
            "/v1/chat/completions",
            {"messages": [{"role": role, "content": [chat_part(data_url())]}]},
            "messages[0].content[0]",
        )
        for role in ("system", "developer", "assistant")
    ),
    *(
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "x", name: "high"}}],
                    }
                ]
            },
            f"messages[0].content[0].image_url.{name}",
        )
        for name in ("detial", "format")
    ),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
        "input[0].content[0].file_id",
    ),
    (
        "/v1/responses",
        {"input": [{"role": "system", "content": [input_part(data_url())]}]},
        "input[0].content[0]",
    ),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [input_part("x") | {"detial": "high"}]}]},
        "input[0].content[0].detial",
    ),
    *(
        (
            "/v1/messages",
            {
                "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}],
                "max_tokens": 4,
            },
            f"messages[0].content[0].source{where}",
        )
        for source, where in (
            ({"type": "file", "file_id": "f"}, ""),
            ({"type": "url"}, ".url"),
            ({"type": "url", "url": "x", "data": "y"}, ".data"),
            ({"type": "base64", "data": "y"}, ".media_type"),
            ({"type": "base64", "data": "y", "media_type": "text/html"}, ".media_type"),
            ({"type": "base64", "data": "y", "media_type": "image/png"}, ".data"),
        )
    ),
    (
        "/v1/messages",
        {
            "messages": [{"role": "user", "content": "x"}],
            "system": [block("https://pictures.example/a")],
            "max_tokens": 4,
        },
        "system[0]",
    ),
]


async def test_a_part_that_no_model_could_be_shown_is_named(server):
    for path, body, where in NOT_SHOWN:
        error = check(await server.request("POST", path, json=body))
        assert error.get("param", where) == where, body
        assert where in f"{error.get('param')} {error['message']}"


@pytest.fixture
def make_loader():
    """`ImageParts` and a loader of those settings, and what they make of such URLs."""

    async def bring(*urls, **settings):
        config = ImageConfig(**settings)
        images, loader = ImageParts(config, ""), Images(config)
        try:
            for i, url in enumerate(urls):
                assert images.media.add(f"part {i}", url) == {"type": "image"}
            return await loader.show(TALK, images)
        finally:
            await loader.close()

    return bring


async def test_images_come_in_order_whatever_brings_them(make_loader):
    sizes = [(8, 9), (10, 11), (12, 13)]
    shown = await make_loader(*(data_url(encoded(picture(*size))) for size in sizes))
    assert isinstance(shown, MultimodalPrompt)
    assert shown.prompt is TALK
    assert [image.shape for image in shown.images] == [(h, w, 3) for w, h in sizes]
    for image, size in zip(shown.images, sizes, strict=True):
        np.testing.assert_array_equal(np.asarray(image), np.asarray(picture(*size)))
    assert await make_loader() is TALK


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("file:///etc/passwd", "part 0 must be a data: URL or one of http or https"),
        ("pictures/a.png", "part 0 must be a data: URL or one of http"),
        ("", "part 0 must be a data: URL or one of http"),
        ("http://pictures.example/a", "part 0: this server fetches no images"),
        ("data:image/png,abc", "part 0 must be a data: URL of base64"),
        ("data:image/png;base64", "part 0 must be a data: URL of base64"),
        ("data:" + "x" * 5000 + ",abc", "part 0 must be a data: URL of base64"),
        ("data:image/tiff;base64,AAAA", "part 0: images of type 'image/tiff'"),
        ("data:;base64,AAAA", "part 0: images of type ''"),
        ("data:image/png;base64,AAA", "part 0: the image is not valid base64"),
        ("data:image/png;base64,AAAA", "part 0: these bytes are no image"),
        (data_url(bomb()), "part 0: the image is too large"),
        (data_url(bomb(8001, 8000)), "part 0: with 8001 x 8000 pixels"),
        ("data:image/png;base64," + "A" * (23 * 2**20), "part 0: the images of this request are"),
    ],
)
async def test_what_an_image_may_not_be(make_loader, url, message):
    with pytest.raises(RequestError) as raised:
        await make_loader(url)
    assert str(raised.value).startswith(message)
    assert raised.value.param == "part 0"


async def test_limits_hold_for_all_images_of_a_request(make_loader):
    small = data_url(encoded(picture(100, 100)))
    for settings, message in (
        ({"max_images": 3}, "part 3 is one image too many: a request may have 3"),
        ({"max_image_mib": 1}, "more than 1 MiB together"),
        ({"max_image_megapixels": 1}, "more than 1 megapixels together"),
    ):
        count = 4 if "max_images" in settings else 101
        with pytest.raises(RequestError, match=message) as raised:
            await make_loader(*[small] * count, **{"max_images": 1000} | settings)
        assert raised.value.param.startswith("part ")


async def test_images_that_wait_are_bounded_in_memory_until_nobody_has_them():
    config = ImageConfig(image_memory_gib=1e-6)
    loader = Images(config)

    async def show():
        images = ImageParts(config, "")
        images.media.add("part", data_url())
        return await loader.show(TALK, images)

    try:
        first = await show()
        with pytest.raises(EngineOverloadedError, match="wait to be prepared take"):
            await show()
        del first
        async with asyncio.timeout(PATIENCE):  # the thread that read it may have it for a moment
            while True:
                with contextlib.suppress(EngineOverloadedError):
                    assert await show()
                    break
                await asyncio.sleep(0.01)
    finally:
        await loader.close()


async def test_slow_urls_of_one_request_leave_room_for_another(monkeypatch):
    monkeypatch.setattr(fetching, "is_public", lambda address: True)
    asked, have_asked = [], asyncio.Event()

    async def stall(request: web.Request) -> web.Response:
        asked.append(request.path)
        if len(asked) == 4:
            have_asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=encoded(), content_type="image/png")

    app = web.Application()
    app.router.add_get("/slow/{number}", stall)
    app.router.add_get("/image", answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host = f"http://127.0.0.1:{runner.addresses[0][1]}"
    config = ImageConfig(image_urls=True, image_timeout=10)
    loader = Images(config)

    def parts(*paths):
        images = ImageParts(config, "")
        for i, path in enumerate(paths):
            images.media.add(f"part {i}", host + path)
        return images

    slow = asyncio.create_task(loader.show(TALK, parts(*(f"/slow/{i}" for i in range(16)))))
    try:
        await have_asked.wait()
        shown = await loader.show(TALK, parts("/image"))
        assert len(shown.images) == 1
        assert len(asked) == 4
    finally:
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        await loader.close()
        await runner.cleanup()


def test_what_the_engine_says_of_an_image_names_its_part():
    images = ImageParts(ImageConfig(), "")
    for i in range(2):
        images.media.add(f"messages[{i}].image_url.url", data_url())
    for error in (
        RequestError("too wide", "images[1]"),
        RequestError("no images[1]", "images[1]"),
    ):
        where = r"messages\[1\]\.image_url\.url"
        with pytest.raises(RequestError, match=where) as raised, images.named():
            raise error
        assert raised.value.param == "messages[1].image_url.url"
        assert "images[1]" not in str(raised.value)
    with pytest.raises(RequestError, match="other") as raised, images.named():
        raise RequestError("other", "images")
    assert raised.value.param == "images"


def test_two_messages_are_joined_by_a_line_where_texts_meet():
    text, image = {"type": "text", "text": "a"}, {"type": "image"}
    assert joined("a", "b") == "a\nb"
    assert joined("", "b") == "b"
    assert joined([image], "") == [image]
    assert joined([image, text], "b") == [
        image,
        text,
        {"type": "text", "text": "\n"},
        {"type": "text", "text": "b"},
    ]
    assert joined("a", [image]) == [text, image]
