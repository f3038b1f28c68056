"""The replicas of one model as an ingress reaches them: a line to each, and what each tells.

The ingress keeps the tokens of requests that may move, since another replica may go on with them.
"""

import asyncio
import functools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec
import zmq

from aioserve.errors import AioserveError, EngineDeadError
from aioserve.fleet.ray.kv_feed import Listener, Ticket, attach, follow
from aioserve.fleet.ray.line import connecting_line
from aioserve.fleet.routing import Dispatcher, ReplicaReport, RouterError, SentLoad
from aioserve.fleet.workers.messages import Quit, ToWorker
from aioserve.fleet.workers.remote_engine import EngineEnd, RemoteDelivery
from aioserve.kv_cache.block_pool import KVEvent
from aioserve.outputs import EngineCoreOutput

# Which replicas there are, as Ray's router of a deployment tells it, by their tickets.


Tickets = dict[str, str]  # of KV feeds, by names of replicas

#: The key of a replica's metadata under which its ticket lies.
TICKET = "kv_feed"

_lock = threading.Lock()
_known: dict[str, Tickets] = {}  # by deployment
_followers: dict[str, list[Callable[[Tickets], object]]] = {}


def deployment_key(name: str, app_name: str) -> str:
    """Return what `publish` and `subscribe` call a deployment."""
    return f"{app_name}#{name}"


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


# What the ingress does with the replicas that there are.


class Movable(ABC):
    """A request whose replica may end its part before the reply is complete."""

    @abstractmethod
    def keep(self, output: EngineCoreOutput) -> bool:
        """Keep the tokens of an output. Whether its end is that of the replica's part alone."""

    @abstractmethod
    def has_left(self) -> None:
        """The replica has ended its part, and all tokens of it have been delivered."""


def keep_tokens(calls: Mapping[str, object], said: ToWorker) -> tuple[ToWorker, list[Movable]]:
    """Return what readers are to hear of `said`, and the requests that have left the replica by it;
    `calls` are the requests of the replica, by id.
    """
    left: list[Movable] = []
    outputs: list[EngineCoreOutput] = []
    for output in said.outputs:
        call = calls.get(output.request_id)
        if isinstance(call, Movable) and call.keep(output):
            left.append(call)
            if not output.new_token_ids:
                continue
            output = msgspec.structs.replace(output, finish_reason=None, stop_reason=None)
        outputs.append(output)
    return (msgspec.structs.replace(said, outputs=outputs) if left else said), left


# The replicas of one model as an ingress reaches them: a line to each, and what each tells. A line
# that is gone is made anew while Ray says that its replica lives. Knows lines and tickets; does not
# know how a replica is chosen.


logger = logging.getLogger(__name__)

# Seconds in which a replica gives a line, and answers on it. A guess.
ATTACH_SECONDS = 10.0
# Seconds before a line is made anew; twice as many each time. Guesses.
FIRST_DELAY, MAX_DELAY = 0.2, 5.0


class Accepted(Protocol):
    """A request that a replica has accepted."""

    def lost(self, error: EngineDeadError) -> None:
        """Note that the replica is gone; the error says how."""


class ReplicaLine:
    """One replica, while there is a line to it."""

    def __init__(
        self,
        name: str,
        ticket: Ticket,
        delivery: RemoteDelivery,
        clock: Callable[[], float],
        on_lost: Callable[[str], object],
        *,
        keeps_tokens: bool = False,
    ) -> None:
        """`ticket` is the replica's; `on_lost` gets the name, before any request hears that the
        line is gone. With `keeps_tokens` requests hear what tokens they get, as they may go on
        elsewhere.
        """
        self.name = name
        self.ticket = ticket
        self._on_lost = on_lost
        self.calls: dict[str, Accepted] = {}  # that it has accepted, by request id
        self.gone: asyncio.Future[EngineDeadError] = asyncio.get_running_loop().create_future()
        self.end: EngineEnd
        self._delivery = delivery
        self._clock = clock
        self._keeps_tokens = keeps_tokens

    def take(self, said: ToWorker) -> None:
        """Take a message of the replica that is no answer."""
        left: list[Movable] = []
        if self._keeps_tokens:
            said, left = keep_tokens(self.calls, said)
        if said.outputs and (stopped := self._delivery.deliver(said)) is not None:
            self.end.say(stopped)
        for call in left:
            call.has_left()
        for failed in said.failed:
            error = failed.failure.to_error()
            if isinstance(error, EngineDeadError):  # that is all that it has
                self.lose(error)
                return
            self._delivery.processor.fail_requests(failed.request_ids, error, self._clock())
        if any(isinstance(message, Quit) for message in said.messages):
            self.lose(EngineDeadError("the replica has ended"))

    def lose(self, error: EngineDeadError) -> None:
        """Note that the line is gone. Told again it changes nothing."""
        if not self.gone.done():
            self.gone.set_result(error)
            self._on_lost(self.name)
            for call in list(self.calls.values()):
                try:
                    call.lost(error)
                except Exception:  # the others are to hear of it
                    logger.exception("a request has not taken in that its replica is gone")
            self.end.fail(error)
            self.end.line.close()

    def has_fault(self, error: Exception) -> None:
        """A message could not be read or written: what waits for it would wait for ever."""
        logger.critical("the line to replica %s has failed", self.name, exc_info=error)
        self.lose(EngineDeadError(f"the line to the replica has failed ({type(error).__name__})"))


class _Hearing(Listener):
    """The feed of one replica, as the router hears it."""

    def __init__(self, name: str, dispatcher: Dispatcher, *, shares_load: bool) -> None:
        self._name = name
        self._dispatcher = dispatcher
        self._shares_load = shares_load

    def on_event(self, event: KVEvent) -> None:
        self._dispatcher.on_kv_event(self._name, event)

    def on_report(self, report: ReplicaReport) -> None:
        reported = report, time.monotonic()
        self._dispatcher.on_report(self._name, lambda: reported)

    def on_others(self, load: SentLoad) -> None:
        self._dispatcher.on_others(self._name, load)

    def own_load(self) -> SentLoad | None:
        return self._dispatcher.own_load(self._name) if self._shares_load else None


class Fleet:
    """All lines of one front end. On its loop."""

    def __init__(
        self,
        delivery: RemoteDelivery,
        clock: Callable[[], float],
        dispatcher: Dispatcher | None,
        *,
        model: str = "",
        shares_load: bool = False,
        role_of: Callable[[str], str] = lambda name: "",
    ) -> None:
        """`dispatcher` hears of all that comes and goes, unless a router of Ray's chooses. Replicas
        with another `model`, as their tickets say, get nothing. With `shares_load` other ingresses
        are told what this one has sent. `role_of` gives the role of a replica by its name.
        """
        self.lines: dict[str, ReplicaLine] = {}  # of replicas that get requests
        self.is_left = False  # there are replicas, and all of them serve another model
        self._delivery = delivery
        self._clock = clock
        self.dispatcher = dispatcher
        self._model = model
        self._shares_load = shares_load
        self._role_of = role_of
        self._keeps_tokens = dispatcher is not None and dispatcher.kind.moves()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._served: dict[str, ReplicaLine] = {}  # also those of replicas that were dismissed
        self._following: dict[str, asyncio.Task[None]] = {}  # what replicas tell, by their names
        self._tasks: set[asyncio.Task[None]] = set()  # those that follow, and have not ended
        self._wanted: set[str] = set()  # names of replicas that there are, as Ray says
        self._has_changed = asyncio.Event()

    def update(self, tickets: dict[str, str]) -> None:
        """These are all replicas from now on: their tickets, by their names."""
        ours = {name: ticket for name, ticket in tickets.items() if self._is_ours(name, ticket)}
        self.is_left, tickets = bool(tickets) and not ours, ours
        for name in self._wanted - tickets.keys():
            self._dismiss(name)
        self._wanted = set(tickets)
        for name, ticket in tickets.items():
            self._keep(name, ticket)

    async def reach(self, name: str, ticket: str) -> ReplicaLine:
        """Return the line to a replica that Ray has chosen. Raises `EngineDeadError` if there is
        none.
        """
        if self._is_ours(name, ticket):
            self._wanted.add(name)
            self._keep(name, ticket)
        while (line := self.lines.get(name)) is None:
            if name not in self._keepers:
                raise EngineDeadError(f"replica {name} cannot be reached")
            self._has_changed.clear()
            await self._has_changed.wait()
        return line

    def _is_ours(self, name: str, ticket: str) -> bool:
        """Return whether the tokens of this front end mean to a replica what they mean here."""
        model = Ticket.decode(ticket).model
        if model == self._model:
            return True
        logger.info("replica %s serves %s, and gets nothing of %s", name, model, self._model)
        return False

    async def first(self) -> None:
        """Return when there is a line."""
        while not self.lines:
            self._has_changed.clear()
            await self._has_changed.wait()

    async def close(self) -> None:
        """Close all lines: what their requests have not got, they will not get."""
        self._wanted.clear()
        for keeper in self._keepers.values():
            keeper.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    def _keep(self, name: str, ticket: str) -> None:
        served = self._served.get(name)
        if served is not None and name not in self.lines:  # Ray had left it out, and has it again
            self._enter(served)
        elif name not in self._keepers:
            keeper = asyncio.create_task(self._live(name, Ticket.decode(ticket)))
            self._keepers[name] = keeper
            keeper.add_done_callback(functools.partial(self._has_given_up, name))

    def _has_given_up(self, name: str, keeper: "asyncio.Task[None]") -> None:
        del self._keepers[name]
        self._wanted.discard(name)
        self._has_changed.set()
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            logger.error("replica %s is not followed any more", name, exc_info=error)

    def _dismiss(self, name: str) -> None:
        """Give the replica nothing new; it finishes what it has, and then hangs up."""
        if self._leave(name) is None and (keeper := self._keepers.get(name)) is not None:
            keeper.cancel()

    async def _live(self, name: str, ticket: Ticket) -> None:
        """Line after line, while there is a dispatcher and Ray says that the replica lives."""
        delay = FIRST_DELAY
        while name in self._wanted:
            try:
                async with asyncio.timeout(ATTACH_SECONDS):
                    line = await self._connect(name, ticket)
                delay = FIRST_DELAY
                await self._serve(line)
            except (AioserveError, OSError) as error:  # a timeout is one
                logger.warning("replica %s cannot be reached: %s", name, error or "no answer")
            if self.dispatcher is None:
                return  # Ray chooses it again, if it lives
            if name in self._wanted:
                await asyncio.sleep(delay)
                delay = min(2 * delay, MAX_DELAY)

    async def _connect(self, name: str, ticket: Ticket) -> ReplicaLine:
        line_ticket = await attach(ticket)
        line = ReplicaLine(
            *(name, ticket, self._delivery, self._clock, self._leave),
            keeps_tokens=self._keeps_tokens,
        )

        def has_gone() -> None:
            line.lose(EngineDeadError("the replica has died"))

        line.end = EngineEnd(
            lambda message, room: connecting_line(
                self._context, line_ticket, message, room, has_gone
            ),
            line.has_fault,
        )
        try:
            await line.end.greet(None)
            line.end.open(line.take)
        except BaseException:
            line.end.line.close()
            raise
        return line

    async def _serve(self, line: ReplicaLine) -> None:
        """Return when the line is gone."""
        self._served[line.name] = line
        self._enter(line)
        try:
            error = await asyncio.shield(line.gone)
            logger.info("the line to replica %s is gone: %s", line.name, error)
        finally:
            del self._served[line.name]
            line.lose(EngineDeadError("the ingress has ended"))

    def _enter(self, line: ReplicaLine) -> None:
        self.lines[line.name] = line
        if (dispatcher := self.dispatcher) is not None:
            join = functools.partial(dispatcher.join, role=self._role_of(line.name))
            self._tell_router(join, line.name)
            self._follow(line, dispatcher)
        self._has_changed.set()

    def _leave(self, name: str) -> ReplicaLine | None:
        line = self.lines.pop(name, None)
        if line is not None and self.dispatcher is not None:
            self._following.pop(name).cancel()
            self._tell_router(self.dispatcher.leave, name)
        return line

    def _follow(self, line: ReplicaLine, dispatcher: Dispatcher) -> None:
        """Follow a replica's events until it leaves; a router that meets it again is told all."""
        hearing = _Hearing(line.name, dispatcher, shares_load=self._shares_load)
        following = asyncio.create_task(follow(line.ticket, hearing))
        self._following[line.name] = following
        self._tasks.add(following)
        following.add_done_callback(self._tasks.discard)

    def _tell_router(self, tell: Callable[[str], None], name: str) -> None:
        """A router that raises when replicas come and go keeps no replica from serving."""
        try:
            tell(name)
        except RouterError:
            logger.exception("the router has not taken in that a replica came or went")
