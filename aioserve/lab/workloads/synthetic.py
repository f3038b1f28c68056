"""Invented traffic from a small YAML file: arrivals, lengths, shared prefixes, conversations.

The same seed gives the same requests on every machine. Knows nothing about serving.
"""

import math
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from heapq import merge
from itertools import accumulate, count

import msgspec

from aioserve.hints import PREDICTED_OUTPUT_TOKENS, Hints
from aioserve.lab.workloads.synthetic_spec import (
    Arrivals,
    ClientClass,
    ClosedLoop,
    Distribution,
    Images,
    Program,
    WorkloadSpec,
)
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest, text_name


def generate(spec: WorkloadSpec, seed: int = 0, name: str = "synthetic") -> Workload:
    """Requests as `spec` says; conversations stand together, at their first turn's place."""
    makers = {c.name: _Maker(c, seed) for c in spec.classes}
    limit = spec.num_requests or math.inf
    requests: list[WorkloadRequest] = []
    num_clients = spec.arrivals.clients if isinstance(spec.arrivals, ClosedLoop) else 0
    # Of each client in turn: its last requests.
    last: deque[tuple[int, ...]] = deque(maxlen=num_clients)
    for arrival, kind in _arrivals(spec, seed):
        if spec.duration is not None and arrival >= spec.duration:
            break
        before = last[0] if num_clients and len(last) == num_clients else ()
        made = makers[kind].make(arrival, len(requests), before)
        awaited = {place for request in made for place in request.waits_for}
        places = range(len(requests), len(requests) + len(made))
        last.append(tuple(place for place in places if place not in awaited))
        requests += made
        if len(requests) >= limit:
            break
    weights = {u: c.weight for c in spec.classes if c.weight is not None for u in c.user_names}
    kept = tuple(requests[: spec.num_requests])
    classes = {c.name: c.slo for c in spec.classes}
    return Workload(
        name, kept, seed=seed, weights=weights, incidents=spec.incidents, classes=classes
    )


def _arrivals(spec: WorkloadSpec, seed: int) -> Iterator[tuple[float, str]]:
    """(seconds, class name) in order, without end; in a closed loop the pauses before each."""
    if isinstance(spec.arrivals, ClosedLoop):
        return _pauses(spec.arrivals, spec.classes, random.Random(f"{seed} arrivals"))
    sharing = [c for c in spec.classes if c.arrivals is None]
    streams = [
        _stream(c.arrivals, [c], random.Random(f"{seed} arrivals {c.name}"))
        for c in spec.classes
        if c.arrivals is not None
    ]
    if sharing and spec.arrivals is not None:
        streams.append(_stream(spec.arrivals, sharing, random.Random(f"{seed} arrivals")))
    return merge(*streams)


def _stream(
    arrivals: Arrivals, classes: list[ClientClass], rng: random.Random
) -> Iterator[tuple[float, str]]:
    now = 0.0
    names, shares = [c.name for c in classes], [c.share for c in classes]
    for gap in arrivals.gaps(rng):
        now += gap
        yield now, rng.choices(names, shares)[0]


def _pauses(
    closed: ClosedLoop, classes: list[ClientClass], rng: random.Random
) -> Iterator[tuple[float, str]]:
    names, shares = [c.name for c in classes], [c.share for c in classes]
    for number in count():
        pause = closed.think_seconds.draw(rng) if number >= closed.clients else 0.0
        yield pause, rng.choices(names, shares)[0]


class _Maker:
    """Makes the requests of one class, from random numbers of its own."""

    def __init__(self, kind: ClientClass, seed: int) -> None:
        self._kind = kind
        self._seed = seed
        self._users = kind.user_names
        self._rng = random.Random(f"{seed} requests {kind.name}")
        self._predictor = random.Random(f"{seed} predictions {kind.name}")
        self._num_texts = 0
        self._num_made = 0
        self._prefixes: list[Piece] = []
        self._popularity: list[float] = []  # cumulative
        self._num_images = 0
        self._images: list[Piece] = []
        if kind.images is not None:
            self._images = [self._image(kind.images) for _ in range(kind.images.count or 0)]
        if kind.prefixes is not None:
            self._prefixes = [
                Piece(
                    text_name("prefix", seed, kind.name, k),
                    _tokens(kind.prefixes.length, self._rng),
                )
                for k in range(kind.prefixes.count)
            ]
            weights = (1 / (k + 1) ** kind.prefixes.zipf for k in range(len(self._prefixes)))
            self._popularity = list(accumulate(weights))

    def make(
        self, arrival: float, place: int, before: tuple[int, ...] = ()
    ) -> list[WorkloadRequest]:
        """One request, or all of a conversation or program, that begins at `place` in the workload.

        In a closed loop it begins `arrival` seconds after the end of the requests `before` it.
        """
        if self._kind.program is not None:
            return self._make_program(self._kind.program, arrival, place, before)
        follows = before[0] if before else -1
        kind, rng = self._kind, self._rng
        user = self._users[self._num_made % kind.users]
        self._num_made += 1
        said = self._prefix()
        num_turns = 1 if kind.session is None else max(1, round(kind.session.turns.draw(rng)))
        requests = []
        for turn in range(num_turns):
            if kind.images is not None and rng.random() < kind.images.share:
                new = not self._images
                said.append(self._image(kind.images) if new else rng.choice(self._images))
            said.append(Piece(self._text(), _tokens(kind.prompt, rng)))
            num_output = _tokens(kind.output, rng)
            requests.append(
                WorkloadRequest(
                    arrival,
                    tuple(said),
                    num_output,
                    priority=kind.priority,
                    user=user,
                    timeout=kind.timeout,
                    follows=place + turn - 1 if turn else follows,
                    kind=kind.name,
                    draft_acceptance=kind.draft_acceptance,
                    session=place if kind.session is not None else -1,
                    max_tokens=kind.max_tokens,
                    hints=self._hints(num_output),
                    adapter=kind.adapter,
                )
            )
            said.append(Piece(self._text(), num_output, reply_of=place + turn))
            if kind.session is not None:
                arrival = kind.session.think_seconds.draw(rng)
        if kind.session is not None and kind.session.abort and rng.random() < kind.session.abort:
            last = rng.randrange(len(requests))
            return [*requests[:last], self._aborted(requests[last])]
        return requests

    def _hints(self, num_output: int) -> Hints:
        if self._kind.prediction is None:
            return self._kind.hints
        predicted = self._kind.prediction.predict(num_output, self._predictor)
        return {**self._kind.hints, PREDICTED_OUTPUT_TOKENS: predicted}

    def _make_program(
        self, program: Program, arrival: float, place: int, before: tuple[int, ...]
    ) -> list[WorkloadRequest]:
        kind, rng, user = self._kind, self._rng, self._users[self._num_made % self._kind.users]
        self._num_made += 1
        said, requests = self._prefix(), list[WorkloadRequest]()
        stage_of: list[int] = []
        stages = program.stages * _tokens(program.rounds, rng)
        for number, stage in enumerate(stages):
            pause = stage.pause_seconds or program.pause_seconds
            width = _tokens(stage.width, rng)
            first = place + len(requests)
            own: list[Piece] = []
            for i in range(width):
                text = Piece(self._text(), _tokens(stage.prompt or kind.prompt, rng))
                num_output = _tokens(stage.output or kind.output, rng)
                requests.append(
                    WorkloadRequest(
                        pause.draw(rng) if number else arrival,
                        (*said, text),
                        num_output,
                        priority=kind.priority,
                        user=user,
                        timeout=kind.timeout,
                        follows=before[0] if before else -1,
                        after=before[1:],
                        kind=kind.name,
                        draft_acceptance=kind.draft_acceptance,
                        session=place,
                        program=place,
                        max_tokens=stage.max_tokens or kind.max_tokens,
                        hints=self._hints(num_output),
                        adapter=kind.adapter,
                    )
                )
                stage_of.append(number)
                own += [text] if width == 1 else []
                own.append(Piece(self._text(), num_output, reply_of=first + i))
            said += own
            before = tuple(range(first, first + width))
        if program.abort and rng.random() < program.abort:
            last = rng.randrange(len(requests))
            requests[last] = self._aborted(requests[last])
            requests = [r for r, s in zip(requests, stage_of, strict=True) if s <= stage_of[last]]
        return requests

    def _aborted(self, request: WorkloadRequest) -> WorkloadRequest:
        """The request of a client that leaves somewhere in the reply."""
        num_tokens = self._rng.randint(1, request.output_tokens)
        return msgspec.structs.replace(request, output_tokens=num_tokens, aborts=True)

    def _prefix(self) -> list[Piece]:
        if not self._prefixes:
            return []
        draw = self._rng.random() * self._popularity[-1]
        return [self._prefixes[bisect_left(self._popularity, draw)]]

    def _image(self, images: Images) -> Piece:
        self._num_images += 1
        name = text_name("image", self._seed, self._kind.name, self._num_images)
        return Piece(name, _tokens(images.tokens, self._rng), is_image=True)

    def _text(self) -> int:
        self._num_texts += 1
        return text_name("text", self._seed, self._kind.name, self._num_texts)


def _tokens(distribution: Distribution, rng: random.Random) -> int:
    return max(1, round(distribution.draw(rng)))
