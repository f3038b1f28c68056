"""How requests were answered: by method, route and status.

Knows aiohttp's routes. Nothing that a client invents becomes a label.
"""

from collections import Counter

from aiohttp import hdrs, web

from aioserve.operations.answers import Counted

LEFT = "499"  # the client has gone before there was an answer: what nginx calls it
OTHER = "other"  # no route of ours, or no method of HTTP


class HttpCounts:
    """Counts of HTTP responses of one application, since the process began."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str]] = Counter()

    def add(self, request: web.Request, status: str) -> None:
        """Count one response with this status."""
        resource = request.match_info.route.resource
        route = OTHER if resource is None else resource.canonical
        method = request.method if request.method in hdrs.METH_ALL else OTHER
        self._counts[method, route, status] += 1

    def tell(self) -> list[Counted]:
        """The counts with their labels, for metrics."""
        counts: list[tuple[tuple[str, ...], int]] = list(self._counts.items())
        return [
            Counted(
                "http_requests",
                "HTTP requests that were answered",
                ("method", "route", "status"),
                counts,
            )
        ]
