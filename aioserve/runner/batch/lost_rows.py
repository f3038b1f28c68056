"""Requests that a runner has given up, and what they have left unwritten.

A step may be on its way that was planned before the scheduler heard of it: such a request gets no
place in it, nor does one that shares blocks with it. Knows ids and blocks; free of torch.
"""

from collections.abc import Collection, Iterable

from aioserve.scheduler.output import CachedRequestData

#: Of a request that shares blocks with one that was given up before it had written them.
SHARED = "the step that served this request failed: it reads what a failed request was to compute"


class LostRows(dict[str, set[int]]):
    """The blocks that a given-up request was to write and has not, by request. While it is empty,
    no method need be called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.why: dict[str, str] = {}  # by request, until it has ended or comes anew

    def add(self, request_id: str, why: str, block_ids: Iterable[int]) -> None:
        """A request is given up, which was to write `block_ids`."""
        self.why[request_id] = why
        self.setdefault(request_id, set()).update(block_ids)

    def come_anew(self, request_ids: Iterable[str]) -> None:
        """The scheduler sends requests of these ids as new ones. Their old blocks are unwritten."""
        for request_id in request_ids:
            self.why.pop(request_id, None)

    def end(self, request_ids: Iterable[str]) -> None:
        """The scheduler says that these have ended: it plans no step any more that reads what they
        have not written.
        """
        for request_id in request_ids:
            self.why.pop(request_id, None)
            self.pop(request_id, None)

    def left_out(self, cached: CachedRequestData) -> CachedRequestData:
        """Without those that were given up; blocks that these get now stay unwritten as well."""
        kept = [
            (request_id, num_computed)
            for request_id, num_computed in zip(
                cached.req_ids, cached.num_computed_tokens, strict=True
            )
            if request_id not in self.why
        ]
        for request_id, block_ids in cached.new_block_ids.items():
            if request_id in self.why:
                self.setdefault(request_id, set()).update(block_ids)
        return CachedRequestData(
            [request_id for request_id, _ in kept],
            [num_computed for _, num_computed in kept],
            {key: own for key, own in cached.new_block_ids.items() if key not in self.why},
        )

    def are_unwritten(self, block_ids: Collection[int]) -> bool:
        """Whether a request was to write one of them, and has not."""
        return any(not own.isdisjoint(block_ids) for own in self.values())

    def note_written(self, block_ids: Collection[int]) -> None:
        """Note that these blocks have been written from their beginning."""
        for request_id, own in list(self.items()):
            own.difference_update(block_ids)
            if not own and request_id not in self.why:
                del self[request_id]
