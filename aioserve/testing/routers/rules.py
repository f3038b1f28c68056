"""The rules of the contract that a toy fleet shows: shares, churn, sessions, old knowledge.

Each raises `RouterViolation`. The bounds are those that docs/writing-a-router.md states.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from aioserve.fleet.routing import Dispatcher, RoutedRequest, Wait
from aioserve.testing.routers.toy_fleet import (
    FULL,
    NUM_SEATS,
    RouterSubject,
    ToyFleet,
    conversations,
    equal_requests,
    one_beginning,
)
from aioserve.testing.violation import RouterViolation

#: Of equal requests to a full fleet a replica gets at least this part of its share.
LEAST_SHARE = 1 / 8
#: A replica is flooded that holds this many times its seats, while another has half of them free.
FLOOD = 4
NUM_REPLICAS = 10
#: Of sessions whose replica lives, the part that stays there when others come and go.
MOST_MOVED = 0.25
#: Times that a request may move from replica to replica while it runs; here it runs for 0.4 s, and
#: behind a split once more.
MOST_MOVES = 3
ROLES = ("prefill", "prefill", "decode", "decode", "decode")

Traffic = Iterable[tuple[float, RoutedRequest]]


def check_same_again(subject: RouterSubject) -> None:
    """Equal calls in equal order give equal answers."""
    one, other = (churned(subject, seed=3) for _ in range(2))
    for first, second in zip(one.decisions, other.decisions, strict=False):
        if first != second:
            raise RouterViolation(
                f"{subject.name}: the same events gave another answer about {first.request_id} at "
                f"{first.when:.3f} s: {second.answer} instead of {first.answer}; chance is "
                "self.rng, time is self.clock()"
            )


def check_shares(subject: RouterSubject) -> None:
    """No replica of a full fleet is starved or flooded by equal requests."""
    fleet = _run(subject, equal_requests(1500, FULL * NUM_REPLICAS))
    _check_starved(subject, fleet, "of equal requests")


def check_one_beginning(subject: RouterSubject) -> None:
    """A beginning that all prompts have does not draw all of them to one replica."""
    _run(subject, one_beginning(1500, FULL * NUM_REPLICAS))


def check_old_knowledge(subject: RouterSubject) -> None:
    """What is half a second old sends no crowd to one replica."""
    fleet = _run(subject, equal_requests(1500, FULL * NUM_REPLICAS), delay=0.5)
    _check_starved(subject, fleet, "with knowledge that is half a second old")


def check_missing_knowledge(subject: RouterSubject) -> None:
    """A replica that has not said anything is neither full nor free of work."""
    silent = frozenset({"r2", "r7"})
    fleet = _run(subject, equal_requests(1500, FULL * NUM_REPLICAS), silent=silent)
    _check_starved(subject, fleet, "where r2 and r7 report nothing")
    _run(subject, equal_requests(400, FULL * NUM_REPLICAS), silent=frozenset(fleet.replicas))


def check_churn(subject: RouterSubject) -> None:
    """Replicas die and come back, unnoticed for a while: every request ends, once."""
    for seed, delay in enumerate((0.0, 0.0, 0.3, 1.0)):
        fleet = churned(subject, seed, delay)
        _check_ends(subject, fleet)


def check_moves(subject: RouterSubject) -> None:
    """A router that splits or migrates requests loses none, and moves none to and fro."""
    kind = subject.kind
    if not kind.splits and kind.rebalance_seconds is None:
        return
    for roles in (ROLES, ()):
        for seed, delay in enumerate((0.0, 0.3)):
            _check_ends(subject, fleet := churned(subject, seed, delay, roles))
            if fleet.most_moves > MOST_MOVES:
                raise RouterViolation(
                    f"{subject.name}: a request that runs for half a second has moved "
                    f"{fleet.most_moves} times; {MOST_MOVES} times are allowed"
                )
    answers = churned(subject, 1, 0.0, ROLES).answers()
    if kind.splits and not any(" " in answer for answer in answers):
        raise RouterViolation(
            f"{subject.name}: splits is stated, and none of {len(answers)} requests to replicas "
            "for prompts and replicas for replies is split"
        )


def check_idle(subject: RouterSubject) -> None:
    """A fleet with nothing to do serves what it is asked, after all that was."""
    fleet = churned(subject, seed=5)
    for number in range(6):
        asked = RoutedRequest(request_id=f"last{number}", num_tokens=32)
        fleet.arrive(fleet.now + 100.0 + number, asked)
    fleet.run()
    ends = [fleet.ends[f"last{number}"] for number in range(6)]
    if "served" not in ends:
        raise RouterViolation(
            f"{subject.name}: an idle fleet of {len(fleet.replicas)} replicas has not served any "
            f"of six requests, which came one after the other: {', '.join(ends)}"
        )


def check_sessions(subject: RouterSubject) -> None:
    """A router that promises it keeps a session at its replica while that lives."""
    if not subject.kind.keeps_sessions:
        return
    names = [f"r{i}" for i in range(NUM_REPLICAS)]
    dispatcher = Dispatcher(subject.kind, dict(subject.options), clock=lambda: 0.0)
    for number, name in enumerate(names):
        dispatcher.join(name, number)
    sessions = [f"s{i}" for i in range(400)]
    before = _homes(subject, dispatcher, sessions)
    dispatcher.leave("r4")
    _check_kept(subject, before, _homes(subject, dispatcher, sessions), "r4 has gone", at_most=0.0)
    dispatcher.join("r4", 4)
    dispatcher.join("r10", 10)
    after = _homes(subject, dispatcher, sessions)
    _check_kept(subject, before, after, "r4 is back and r10 has come", at_most=MOST_MOVED)
    if after != (again := _homes(subject, dispatcher, sessions)):
        _check_kept(subject, after, again, "no replica came or went", at_most=0.0)


def check_hints(subject: RouterSubject) -> None:
    """What the router is shown is the same afterwards."""
    traffic = list(conversations(60, FULL))
    before = [repr(request) for _, request in traffic]
    _run(subject, traffic, num_replicas=3, may_flood=True)
    for text, (_, request) in zip(before, traffic, strict=True):
        if text != repr(request):
            raise RouterViolation(f"{subject.name} has changed a request: {request!r}")


def churned(
    subject: RouterSubject, seed: int, delay: float = 0.0, roles: Sequence[str] = ()
) -> ToyFleet:
    """Conversations on five replicas, of which some die and come back, all of them at once too."""
    fleet = subject.fleet(5, delay=delay, seed=seed, roles=roles)
    for when, request in conversations(400, 4 * FULL, seed):
        fleet.arrive(when, request)
    rng = random.Random(f"{seed} churn")
    for _ in range(10):
        when, name = 1.0 + 7.0 * rng.random(), f"r{rng.randrange(5)}"
        fleet.at(when, partial(_fall, fleet, name, 0.05 + rng.random()))
    for number in range(5):
        fleet.at(5.0 + 0.01 * number, partial(_fall, fleet, f"r{number}", 0.5))
    fleet.run()
    return fleet


def _check_ends(subject: RouterSubject, fleet: ToyFleet) -> None:
    """Each request has ended, and none has waited for the router for a minute."""
    asked = {decision.request_id for decision in fleet.decisions}
    if lost := sorted(asked - fleet.ends.keys()):
        raise RouterViolation(f"{subject.name}: {lost[0]} has not ended, of {len(asked)}")
    if waited := [name for name, end in fleet.ends.items() if end == "waited"]:
        raise RouterViolation(
            f"{subject.name}: {waited[0]} waited for the router for a minute and got no replica"
        )


def _fall(fleet: ToyFleet, name: str, seconds: float) -> None:
    if name in fleet.replicas:
        fleet.kill(name)
        fleet.at(fleet.now + seconds, partial(fleet.start, name))


def _run(
    subject: RouterSubject,
    traffic: Traffic,
    *,
    num_replicas: int = NUM_REPLICAS,
    delay: float = 0.0,
    silent: frozenset[str] = frozenset(),
    may_flood: bool = False,
) -> ToyFleet:
    fleet = subject.fleet(num_replicas, delay=delay, silent=silent)
    for when, request in traffic:
        fleet.arrive(when, request)
        if not may_flood:
            fleet.at(when, partial(_check_flood, subject, fleet))
    fleet.run()
    return fleet


def _check_flood(subject: RouterSubject, fleet: ToyFleet) -> None:
    held = {name: replica.num_requests for name, replica in fleet.replicas.items()}
    most, least = max(held, key=held.__getitem__), min(held, key=held.__getitem__)
    if held[most] > FLOOD * NUM_SEATS and held[least] <= NUM_SEATS // 2:
        raise RouterViolation(
            f"{subject.name}: at {fleet.now:.3f} s {most} holds {held[most]} requests and {least} "
            f"{held[least]}, of {NUM_SEATS} seats each: a replica is flooded that holds more than "
            f"{FLOOD} times its seats while another has half of them free"
        )


def _check_starved(subject: RouterSubject, fleet: ToyFleet, where: str) -> None:
    due = LEAST_SHARE * fleet.num_sent.total() / len(fleet.replicas)
    for name in fleet.replicas:
        if fleet.num_sent[name] < due:
            raise RouterViolation(
                f"{subject.name}: {name} was sent {fleet.num_sent[name]} of "
                f"{fleet.num_sent.total()} requests to a full fleet of {len(fleet.replicas)}, "
                f"{where}: it is due an eighth of its share at least, {due:.0f}"
            )


def _homes(subject: RouterSubject, dispatcher: Dispatcher, sessions: list[str]) -> dict[str, str]:
    return {session: _home(subject, dispatcher, session) for session in sessions}


def _home(subject: RouterSubject, dispatcher: Dispatcher, session: str) -> str:
    asked = RoutedRequest(num_tokens=100, session=session, hints={"session": session})
    answer = dispatcher.choose(asked)
    if not isinstance(answer, str):
        words = "lets it wait" if isinstance(answer, Wait) else f"answers {answer!r}"
        raise RouterViolation(
            f"{subject.name}: {session} has an idle fleet, and the router {words}"
        )
    assignment = dispatcher.assign(asked, answer)
    assignment.has_started(0.0)
    assignment.has_ended()
    return answer


def _check_kept(
    subject: RouterSubject,
    before: dict[str, str],
    after: dict[str, str],
    what: str,
    at_most: float,
) -> None:
    gone = set(before.values()) - set(after.values())
    moved = list(_moved(before, after, gone))
    if len(moved) > at_most * len(before):
        session = moved[0]
        raise RouterViolation(
            f"{subject.name}: keeps_sessions is promised, and {len(moved)} of {len(before)} "
            f"sessions have left a replica that lives after {what}, such as {session} from "
            f"{before[session]} to {after[session]}; {at_most:.0%} may"
        )


def _moved(before: dict[str, str], after: dict[str, str], gone: set[str]) -> Iterator[str]:
    return (s for s, home in before.items() if home not in gone and after[s] != home)
