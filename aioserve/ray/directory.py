"""Which replicas of each deployment there are, told by Ray's routers to the ingress they are in.

Ray makes a router for each handle, on a thread of its own; the ingress made the handle. Knows names
and tickets; does not know Ray.
"""

import threading
from collections.abc import Callable

Tickets = dict[str, str]  # of KV feeds, by names of replicas

_lock = threading.Lock()
_known: dict[str, Tickets] = {}  # by deployment
_followers: dict[str, list[Callable[[Tickets], object]]] = {}


def publish(deployment: str, tickets: Tickets) -> None:
    """These are all replicas of a deployment from now on. From any thread."""
    with _lock:
        _known[deployment] = tickets
        followers = list(_followers.get(deployment, ()))
    for follower in followers:
        follower(tickets)


def subscribe(deployment: str, follower: Callable[[Tickets], object]) -> None:
    """Call `follower` with all replicas of a deployment, now if any are known, and whenever they
    change: on the thread of Ray's router.
    """
    with _lock:
        _followers.setdefault(deployment, []).append(follower)
        tickets = _known.get(deployment)
    if tickets is not None:
        follower(tickets)


def unsubscribe(deployment: str, follower: Callable[[Tickets], object]) -> None:
    """End a subscription: `follower` is not called for this deployment any more."""
    with _lock:
        _followers[deployment].remove(follower)
