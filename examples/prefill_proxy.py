"""A proxy in front of an engine that computes prompts and one that writes the replies.

    aioserve --port 8001 --kv-connector disk --kv-connector-path /dev/shm/kv --kv-role producer
    aioserve --port 8002 --kv-connector disk --kv-connector-path /dev/shm/kv
    python examples/prefill_proxy.py --port 8000 \\
        --prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8002

Each request goes to the first, for a single token: its answer says that the blocks of the prompt
are in the directory. Then it goes to the second as it came. If the first fails, the second does
both.
"""

import argparse
from typing import Any

import aiohttp
from aiohttp import web

ROUTES = ("/v1/completions", "/v1/chat/completions")
PREFILL, DECODE = web.AppKey("prefill", str), web.AppKey("decode", str)
SESSION = web.AppKey("session", aiohttp.ClientSession)


def prompt_alone(body: dict[str, Any]) -> dict[str, Any]:
    """The same prompt, for one token that nobody reads."""
    asked_elsewhere = ("max_completion_tokens", "min_tokens", "stream_options", "n", "stop")
    kept = {name: value for name, value in body.items() if name not in asked_elsewhere}
    return kept | {"max_tokens": 1, "stream": False}


async def handle(request: web.Request) -> web.StreamResponse:
    body = await request.read()
    session = request.app[SESSION]
    try:
        prompt = prompt_alone(await request.json())
        async with session.post(request.app[PREFILL] + request.path, json=prompt) as answer:
            await answer.read()
    except (aiohttp.ClientError, AttributeError, ValueError):
        pass  # the second says what is wrong with it, or does without
    headers = {"Content-Type": request.headers.get("Content-Type", "application/json")}
    async with session.post(
        request.app[DECODE] + request.path, data=body, headers=headers
    ) as answer:
        reply = web.StreamResponse(
            status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]}
        )
        await reply.prepare(request)
        async for chunk in answer.content.iter_any():
            await reply.write(chunk)
        await reply.write_eof()
        return reply


def make_app(prefill: str, decode: str) -> web.Application:
    """Addresses of the two, without a slash at the end."""

    async def keep_session(app: web.Application) -> Any:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            app[SESSION] = session
            yield

    app = web.Application(client_max_size=1 << 26)
    app[PREFILL], app[DECODE] = prefill, decode
    app.cleanup_ctx.append(keep_session)
    app.add_routes([web.post(route, handle) for route in ROUTES])
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", required=True, help="address of the producer")
    parser.add_argument("--decode", required=True, help="address of the one that writes replies")
    args = parser.parse_args()
    web.run_app(make_app(args.prefill, args.decode), host="127.0.0.1", port=args.port)
