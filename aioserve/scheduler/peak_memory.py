"""How much KV memory running requests will hold at most, if each goes on to its length.

A part for policies that admit by the future instead of preempting: LightLLM's rule (its
`_can_add_new_req`), which S-LoRA took over, and the test inside of Past-Future and MC-SF.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from itertools import islice
from operator import attrgetter

from aioserve.request import Request


class PeakMemory:
    """The peak of KV tokens that some requests hold together, as one after the other ends.

    Every request gets a token a step until its final length, so when the k requests with the most
    tokens to go are left, each of them has grown by what the last of the k has to go. The peak is
    the largest of these k sums. Shared prefixes count once for each request.

    `PeakMemory(running, total)`: `total`, a function of a request, says how many tokens it will
    have at its end, prompt and reply together: its limit, if no function is given. A request that
    has as many already counts as it is.
    """

    def __init__(
        self,
        requests: Iterable[Request] = (),
        total: Callable[[Request], float] = attrgetter("max_total_tokens"),
    ) -> None:
        self._total = total
        #: (tokens to go, negative; tokens now) of each request: the most to go first.
        self._rows = sorted(map(self._row, requests))

    def __len__(self) -> int:
        """The number of requests that count as running."""
        return len(self._rows)

    def add(self, request: Request) -> None:
        """Count `request` as one that runs."""
        insort(self._rows, self._row(request))

    def with_request(self, request: Request) -> int:
        """The peak in tokens if `request` ran as well."""
        rows = self._rows.copy()
        insort(rows, self._row(request))
        return _peak(rows)

    def num_fitting(self, requests: Iterable[Request], capacity: float) -> int:
        """How many of `requests`, in order, may run as well until the peak in tokens is more than
        `capacity`. Doubles the number until it is too many, then halves what is left: O(log k)
        peaks for k that fit, where one `with_request` after the other takes k.
        """
        source, rows, num_fitting = iter(requests), list[tuple[int, int]](), 0
        while more := [self._row(request) for request in islice(source, len(rows) + 1)]:
            rows += more
            if _peak(sorted(self._rows + rows)) > capacity:
                counts = range(num_fitting + 1, len(rows))
                return num_fitting + bisect_left(
                    counts, x=True, key=lambda n: _peak(sorted(self._rows + rows[:n])) > capacity
                )
            num_fitting = len(rows)
        return num_fitting

    @property
    def peak(self) -> int:
        """The peak in tokens; 0 if nothing runs."""
        return _peak(self._rows)

    def _row(self, request: Request) -> tuple[int, int]:
        """A request that has not run yet holds its prompt and the token that its step samples."""
        to_go = max(int(self._total(request)) - request.num_tokens - 1, 0)
        return -to_go, request.num_tokens + (request.num_output_tokens == 0)


def _peak(rows: list[tuple[int, int]]) -> int:
    peak = held = 0
    for count, (minus_to_go, num_tokens) in enumerate(rows, start=1):
        held += num_tokens
        peak = max(peak, held - count * minus_to_go)
    return peak
