"""The samples of one request, and the ids that nobody else may take while one of them lives.

Knows ids and the stream. Knows nothing about tokens.
"""

from aioserve.engine.stream import RequestStream


class Samples:
    """The samples of one request: they share a reader, and nobody else gets their ids or its own
    while one of them lives.
    """

    __slots__ = (
        "claimed_ids",
        "ids",
        "is_aborted",
        "is_arriving",
        "num_live",
        "request_id",
        "stream",
    )

    def __init__(self, stream: RequestStream, n: int) -> None:
        self.request_id = stream.request_id
        self.stream = stream
        self.ids = [self.request_id]
        self.claimed_ids = self.ids
        if n > 1:
            self.ids = [f"{self.request_id}-{i}" for i in range(n)]
            self.claimed_ids = [self.request_id, *self.ids]
        self.num_live = n
        self.is_arriving = True  # being tokenized: nothing can be ended yet
        self.is_aborted = False  # meanwhile
