"""Longest cached prefix among clients with a deficit left (DLPM, 2025).

Paper: Cao et al., "Locality-aware Fair Scheduling in LLM Serving", 2025, arXiv 2501.14312.

Aim: cache hits, within a bound on how unequally clients are served.

Says: each client has a deficit counter, which service takes down. Among clients above zero the
request with the longest cached prefix goes next. When no waiting client is above zero, each gets a
quantum more. The larger the quantum, the more hits, and the more clients may differ in service.

Simplified: one engine; the paper's D2LPM also chooses the replica. The prefixes of `window`
requests are compared, oldest first.

Cost: O(w log w) of w waiting requests compared, in steps with a free seat.

Needs: clients (the request's user).
"""

from collections import Counter, defaultdict
from itertools import islice
from typing import Any

from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    Request,
    SchedulerOutput,
)

FORGET_EVERY = 256  # steps
MAX_DEBTORS = 4096  # clients that are away whose debts are kept


class DLPMScheduler(BaseScheduler):
    """Decodes, running prompts, then the longest cached prefix of clients with a deficit left."""

    class Options(PolicyOptions):
        quantum: PositiveFloat = 4096.0  # virtual tokens that each client gets at a refill
        input_weight: PositiveFloat = 1.0  # charge for a prompt token that is computed
        output_weight: PositiveFloat = 2.0  # charge for a generated token
        chunk_size: PositiveInt | None = None  # tokens per step (default: max_num_batched_tokens)
        window: PositiveInt = 256  # waiting requests compared per step, oldest first

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        quantum = self.options.quantum
        self.deficit: dict[str, float] = defaultdict(lambda: quantum)  # by client

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(self.options.chunk_size)
        prefills = step.run_decodes()
        for user, num_tokens in Counter(r.user for r in step.requests).items():
            self.deficit[user] -= self.options.output_weight * num_tokens
        for request in prefills:
            self.deficit[request.user] -= self.options.input_weight * step.run(request)
        has_room = step.token_budget > 0 and len(self.running) < self.max_num_seqs
        line = list(islice(self.waiting, self.options.window if has_room else 1))
        line.sort(key=self.kv_cache.estimate_cached_tokens, reverse=True)
        while line:
            poor: list[Request] = []
            for request in line:
                if self.deficit[request.user] <= 0:
                    poor.append(request)
                    continue
                granted = step.admit(request)
                if not granted:  # no request passes one that does not fit, or it would never fit
                    return step.output()
                self.deficit[request.user] -= self.options.input_weight * granted
            if len(poor) == len(line):
                self.refill({request.user for request in poor})
            line = poor
        if self.num_steps % FORGET_EVERY == 0:
            self.forget()
        return step.output()

    def refill(self, users: set[str]) -> None:
        """Give each client as many quanta as bring the first of them above zero."""
        highest = max(self.deficit[user] for user in users)
        quanta = 1 + int(-highest // self.options.quantum)
        for user in users:
            self.deficit[user] += quanta * self.options.quantum

    def forget(self) -> None:
        """Drop clients that are away with a full deficit, and, if too many clients are in debt, the
        ones that owe least, to bound memory.
        """
        present = {request.user for request in self.running} | {r.user for r in self.waiting}
        away = sorted((d, u) for u, d in self.deficit.items() if u not in present)
        for place, (deficit, user) in enumerate(away):
            if deficit >= self.options.quantum or place >= MAX_DEBTORS:
                del self.deficit[user]
