"""How often a stream is passed on through Ray, whose messages cost as much as dozens of tokens.

A lone stream goes on piece by piece. The more there are, the longer each gathers what comes, so
that all of them together stay below a share of one core.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from aiohttp import ClientResponse

# Seconds between two pieces of a stream for each stream beside it, and at most. A message costs the
# ingress and the proxy half a millisecond together; these are half of one core for both. Guesses.
SECONDS_PER_STREAM = 1e-3
MAX_SECONDS = 0.05


class Pace:
    """Of all streams of one ingress."""

    def __init__(self) -> None:
        self._num_streams = 0

    async def pieces(self, response: ClientResponse) -> AsyncIterator[bytes]:
        """The body of `response` in pieces; the first one and the end at once."""
        content = response.content
        with self._counted():
            async for piece in content.iter_any():
                yield piece
                seconds = self.seconds
                if seconds and not content.at_eof():
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(content.wait_eof(), seconds)

    @property
    def seconds(self) -> float:
        """Between two pieces of a stream, with as many streams as there are now."""
        return min((self._num_streams - 1) * SECONDS_PER_STREAM, MAX_SECONDS)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1
