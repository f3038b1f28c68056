"""How many adapters running requests may have together.

Whoever runs keeps its adapter's place until it ends or is preempted, so no step ever has more, and
nobody who runs waits for another's. Knows adapter ids; knows nothing about weights.
"""

from collections.abc import Iterable

from aioserve.request import Request


def adapters_of(requests: Iterable[Request]) -> set[str]:
    """Those that are used; having none is none."""
    return {request.adapter_id for request in requests} - {""}


def has_place(request: Request, running: Iterable[Request], max_loras: int) -> bool:
    """Whether a request may run beside those that do."""
    if not request.adapter_id:
        return True
    others = adapters_of(running)
    return request.adapter_id in others or len(others) < max_loras
