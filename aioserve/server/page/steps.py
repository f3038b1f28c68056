"""The stream of steps: what the scheduler does, told to clients that watch.

Asks the engine for the next frames when the last are written, so a reader that sleeps costs a
socket's buffer and no more. Knows nothing about what is in a frame.
"""

from aiohttp import web

from aioserve.engine.live_feed import Frame, Snapshot
from aioserve.errors import AioserveError, EngineDeadError, RequestError
from aioserve.operations import ShowSteps
from aioserve.server.errors import to_wire
from aioserve.server.keys import ENGINE
from aioserve.server.openapi import Route
from aioserve.server.protocol import ErrorResponse
from aioserve.server.sse import EventStream, event


async def stream_steps(request: web.Request) -> web.StreamResponse:
    """GET /watch/steps: a snapshot, then a frame whenever something has happened."""
    if request.method == "HEAD":
        return web.Response(content_type="text/event-stream")
    engine, stream, number = request.app[ENGINE], EventStream(request), 0
    while True:
        try:
            seen = await engine.ask(ShowSteps(number))
        except AioserveError as error:
            if not stream.started:
                raise
            return await stream.end(event(to_wire(error)[1]))
        number = seen.number
        await stream.send(b"".join(b"data: " + frame + b"\n\n" for frame in seen.frames))


ROUTES = (
    Route(
        "GET",
        "/watch/steps",
        stream_steps,
        "What the scheduler does, as it does it.",
        str,
        events=(Snapshot, Frame, ErrorResponse),
        raises=(RequestError, EngineDeadError),
        media_types=("text/event-stream",),
        needs="looker",  # it tells of all clients' requests
    ),
)
