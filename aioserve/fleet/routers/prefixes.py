"""Routers by cached prefix: what a replica saves of a prompt, against what it has to do.

Each class says its source, what is simplified, and the cost of a decision for n replicas.
"""

import math
from collections import OrderedDict, deque
from typing import Any

from aioserve.fleet.routers.simple import work_of
from aioserve.fleet.routing import (
    BaseRouter,
    NonNegativeFloat,
    PositiveFloat,
    Replicas,
    ReplicaView,
    RoutedRequest,
    RouterOptions,
)

MOST_KEPT = 10_000  # requests of the window of `Preble`
MOST_SESSIONS = 10_000  # that `Scorers` remembers


class PrefixAware(BaseRouter):
    """A router that chooses the least busy holder of the longest prefix, unless waiting there costs
    more tokens than the prefix saves; then the least busy replica of all. O(blocks + n).
    """

    uses_prefixes = True

    def choose(self, request: RoutedRequest, replicas: Replicas) -> ReplicaView:
        least = min(replicas, key=work_of)
        longest, names = self.prefixes.longest(request)
        named = set(names)
        holders = [replica for replica in replicas if replica.name in named]
        if not holders:
            return least
        holder = min(holders, key=work_of)
        saved = longest - self.prefixes.cached_tokens(request, least.name)
        return least if holder.work - least.work > saved else holder


class LMetric(BaseRouter):
    """A router that chooses the replica with the least (tokens to compute) x (batch size). O(blocks
    + n).

    Paper: Zhang et al., "LMetric: Simple is Better: Multiplication May Be All You Need for LLM
    Request Scheduling", OSDI'26, arXiv 2603.15202.

    Aim: cached prefixes and an even load at once, without a weight between the two: a weight of
    either factor would cancel out in the comparison.

    Simplified: prompt tokens are those of the request that are not cached and those that were sent
    and have no first token; the batch counts the request itself, so that no score is 0.
    """

    uses_prefixes = True
    uses_reports = True

    def choose(self, request: RoutedRequest, replicas: Replicas) -> ReplicaView:
        cached = self.prefixes.by_name(request)
        chosen, least, whole = replicas[0], math.inf, max(request.num_tokens, 1)
        for replica in replicas:  # without a call for each: a fleet may have thousands
            batch = replica.num_running + replica.num_waiting
            batch = max(batch, replica.num_sent) if replica.num_sent else batch
            new = max(whole - cached[replica.name], 1) if replica.name in cached else whole
            score = (replica.num_unstarted_tokens + new) * (batch + 1)
            if score < least:
                chosen, least = replica, score
        return chosen


class Preble(BaseRouter):
    """A router that exploits long cached prefixes, explores for other prompts, and evens out load.

    Paper: Srivatsa et al., "Preble: Efficient Distributed Prompt Scheduling for LLM Serving",
    ICLR'25, arXiv 2407.00023: its global scheduler, E2.

    Aim: exploit shared prefixes without piling their requests up, and explore the other replicas.

    Says: if more of the prompt is cached somewhere than is missing, exploit: of the replicas with
    the longest prefix the one with the least load. Otherwise explore: the replica with the least
    sum of its load in a window of time and the tokens that are missing there. A replica whose load
    is several times the least gives its exploiting requests away to the least loaded.

    Simplified: load is in tokens: what was computed for requests sent in the window, and what is
    held now. The cost of what would be evicted is left out, since a router does not know it; so is
    growing a hot prefix onto more replicas ahead of time.

    Cost: O(blocks + n) of n replicas.
    """

    uses_prefixes = True

    class Options(RouterOptions):
        window: PositiveFloat = 180.0  # seconds of the past whose load counts
        imbalance: PositiveFloat = 2.0  # times the least load from which exploiting ends

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sent: deque[tuple[float, str, int]] = deque()  # time, replica, tokens computed
        self.computed: dict[str, int] = {}  # tokens in the window, by replica

    def choose(self, request: RoutedRequest, replicas: Replicas) -> ReplicaView:
        self.forget_old()
        loads = {r.name: r.work + self.computed.get(r.name, 0) for r in replicas}
        cached = self.prefixes.by_name(request)
        least = min(replicas, key=lambda r: loads[r.name])
        longest = max((cached.get(r.name, 0) for r in replicas), default=0)
        if 2 * longest > request.num_tokens:
            holders = [r for r in replicas if cached.get(r.name, 0) == longest]
            chosen = min(holders, key=lambda r: loads[r.name])
            bound = self.options.imbalance * (loads[least.name] + request.num_tokens)
            if loads[chosen.name] > bound:
                chosen = least
        else:
            chosen = min(replicas, key=lambda r: loads[r.name] - cached.get(r.name, 0))
        missing = request.num_tokens - cached.get(chosen.name, 0)
        self.sent.append((self.clock(), chosen.name, missing))
        self.computed[chosen.name] = self.computed.get(chosen.name, 0) + missing
        return chosen

    def forget_old(self) -> None:
        """Take off what was sent before the window."""
        begin = self.clock() - self.options.window
        while self.sent and (self.sent[0][0] < begin or len(self.sent) > MOST_KEPT):
            _, name, tokens = self.sent.popleft()
            if name in self.computed:
                self.computed[name] -= tokens

    def on_join(self, name: str) -> None:
        self.sent = deque(entry for entry in self.sent if entry[1] != name)
        self.computed[name] = 0

    def on_leave(self, name: str) -> None:
        self.computed.pop(name, None)


class Scorers(BaseRouter):
    """A router that chooses the replica with the greatest weighted score.

    Source: llm-d, "Request Scheduler" (llm-d.ai/docs, 0.8): filters, scorers with weights, a
    picker.

    Aim: one router for many wishes, by weights instead of code.

    Says: `prefix` is the share of the prompt that is cached; `queue` is 1 for the shortest queue of
    all and 0 for the longest; `kv_cache` is the free share of the KV cache; `session` is 1 for the
    replica that had the session last; `adapter` is 1 where the request's LoRA adapter is loaded and
    half of it where that is not known; `latency` is 1 for the shortest step with one request more,
    by the line that the replica has learned, and 0 for the longest; `eviction` is 1 where the
    prompt fits beside all cached prefixes. The replica with the greatest sum wins.

    Simplified: no filters. Ties go to the least work, not to chance. Sessions are remembered for
    the last 10,000.

    Cost: O(blocks + n) of n replicas.
    """

    uses_prefixes = True
    uses_reports = True

    class Options(RouterOptions):
        prefix: NonNegativeFloat = 3.0
        queue: NonNegativeFloat = 2.0
        kv_cache: NonNegativeFloat = 2.0
        session: NonNegativeFloat = 0.0
        adapter: NonNegativeFloat = 2.0  # of requests that are for one
        latency: NonNegativeFloat = 0.0
        eviction: NonNegativeFloat = 0.0

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.homes: OrderedDict[str, str] = OrderedDict()  # by session, the longest unused first

    def choose(self, request: RoutedRequest, replicas: Replicas) -> ReplicaView:
        weights, cached = self.options, self.prefixes.by_name(request)
        home = self.homes.get(request.session, "") if weights.session else ""
        queues = [self.queue_of(replica) for replica in replicas]
        longest, spread = max(queues), max(max(queues) - min(queues), 1)
        steps = [self.step_of(replica) for replica in replicas] if weights.latency else [0.0]
        slowest, step_spread = max(steps), max(steps) - min(steps) or 1.0

        def score(replica: ReplicaView) -> tuple[float, float]:
            total = weights.prefix * cached.get(replica.name, 0) / max(request.num_tokens, 1)
            total += weights.queue * (longest - self.queue_of(replica)) / spread
            total += weights.kv_cache * replica.num_free_kv_tokens / max(replica.num_kv_tokens, 1)
            if weights.adapter and request.adapter:
                total += weights.adapter * self.has_adapter(request, replica)
            if weights.latency:
                total += weights.latency * (slowest - self.step_of(replica)) / step_spread
            if weights.eviction:
                missing = request.num_tokens - cached.get(replica.name, 0)
                total += weights.eviction * (missing <= self.num_unused(replica))
            return total + weights.session * (replica.name == home), -replica.work

        chosen = max(replicas, key=score)
        if weights.session and request.session:
            self.homes[request.session] = chosen.name
            self.homes.move_to_end(request.session)
            if len(self.homes) > MOST_SESSIONS:
                self.homes.popitem(last=False)
        return chosen

    @staticmethod
    def queue_of(replica: ReplicaView) -> int:
        """Return requests that wait: as reported, and those that were sent and are not reported
        yet.
        """
        return max(replica.num_waiting, replica.num_sent - replica.num_running)

    @staticmethod
    def has_adapter(request: RoutedRequest, replica: ReplicaView) -> float:
        """1 if the adapter of the request is loaded, 0 if not, a half if that is not known."""
        return 0.5 if replica.adapters is None else float(request.adapter in replica.adapters)

    @staticmethod
    def step_of(replica: ReplicaView) -> float:
        """Return seconds that a step takes with one request more."""
        return replica.step_seconds_with(replica.num_requests + 1)

    @staticmethod
    def num_unused(replica: ReplicaView) -> int:
        """Free tokens of the KV cache without a cached prefix; all free ones if none is known."""
        return replica.num_free_kv_tokens - (replica.num_evictable_kv_tokens or 0)
