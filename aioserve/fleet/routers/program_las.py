"""The program that has had least is sent first while the fleet is full (llm-d, 2026).

Source: "Add program aware fairness plugin", 2026, llm-d-router pull request 1534, strategy `las`;
Luo et al., "Autellix: An Efficient Serving Engine for LLM Agents as General Programs", 2025,
arXiv 2502.13965.

Aim: programs of many requests end early, none because it sends more requests than others.

Says: while every replica is full, requests wait in front of the fleet, in a queue for each program.
When a place is free, the queue goes first whose program has attained the least service: the tokens
of its ended requests, those of replies twice. Service decays while a program is idle, and waiting
counts as well, so that none starves.

Simplified: a second of waiting is worth `credit` tokens, where llm-d adds two numbers from 0 to 1
with weights. The service of a program that goes on does not decay. A replica is full once `queue`
requests wait there beside its seats. Among those that are not, a request goes to the one that had
its program's last, else to the one with the least work.

Cost: O(n) of n replicas, and O(h) of h requests in line for each place that becomes free.
"""

from typing import Annotated

from msgspec import Meta

from aioserve.fleet.routing import (
    Answer,
    BaseRouter,
    Hold,
    NonNegativeFloat,
    PositiveFloat,
    Replicas,
    ReplicaView,
    RoutedRequest,
    RouterOptions,
)


class ProgramLAS(BaseRouter):
    """A router that keeps requests in line while the fleet is full, by what programs have had."""

    uses_reports = True
    uses_programs = True
    holds = True

    class Options(RouterOptions):
        queue: Annotated[int, Meta(ge=0)] = 2  # requests that may wait at a replica
        half_life: PositiveFloat = 60.0  # seconds of idleness that halve a program's service
        credit: NonNegativeFloat = 200.0  # tokens of service that a second of waiting is worth

    options: Options

    def choose(self, request: RoutedRequest, replicas: Replicas) -> Answer:
        free = [replica for replica in replicas if not self.is_full(replica)]
        if not free:
            return Hold()
        program = self.programs.of(request)
        home = "" if program is None else program.replica
        return min(free, key=lambda replica: (replica.name != home, replica.work))

    def is_full(self, replica: ReplicaView) -> bool:
        seats = replica.max_num_seqs
        return seats > 0 and replica.num_requests >= seats + self.options.queue

    def order(self, request: RoutedRequest) -> float:
        now = self.clock()
        credit = self.options.credit * (now - request.arrival_time)
        if (program := self.programs.of(request)) is None:
            return -credit
        idle = 0.0 if program.num_running else max(now - program.since, 0.0)
        left: float = 0.5 ** (idle / self.options.half_life)
        return program.service * left - credit
