"""What an ingress counts of its router's decisions, as Prometheus text.

Counted in plain numbers and read on a scrape. Knows no router and no request.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from aioserve.engine.metric_families import LATENCY_BUCKETS, Histogram
from aioserve.operations.command import Counted

#: What became of a question to the router: a replica; a refusal; a wait; an error of the router,
#: for which the replica with the least work got the request; each replica had as many requests as
#: it may have; there was no replica.
Outcome = Literal["sent", "refused", "waits", "failed", "full", "no_replica"]

# Of a decision, which takes microseconds, and of what is known, which is a tenth of a second old.
DECISION_BUCKETS = (5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, *LATENCY_BUCKETS)

# Reasons of refusals that are told apart; what comes after them is "other". A router that puts
# numbers into its reasons would fill Prometheus otherwise. A guess.
MAX_REASONS = 20


class RouterMetrics:
    """Of one router in one ingress, since its start."""

    def __init__(self, model: str, router: str, get_num_replicas: Callable[[], int]) -> None:
        """`model` and `router` are their names; `get_num_replicas` says how many can be sent
        requests.
        """
        self.labels = (model, router)
        self.get_num_replicas = get_num_replicas
        self.outcomes: Counter[Outcome] = Counter()
        self.refusals: Counter[str] = Counter()  # by reason
        self.num_resent = 0  # requests whose replica was gone before it had told anything
        self.num_moved = 0  # requests with which another replica went on
        self.decision_seconds = Histogram(DECISION_BUCKETS)
        self.knowledge_age = Histogram()  # seconds, of the replica that was chosen

    def on_refused(self, reason: str) -> None:
        """The router refuses a request."""
        self.outcomes["refused"] += 1
        known = reason in self.refusals or len(self.refusals) < MAX_REASONS
        self.refusals[reason if known else "other"] += 1

    def on_resent(self) -> None:
        """A request goes to another replica than the one that has failed it."""
        self.num_resent += 1

    def on_sent(self, age: float) -> None:
        """A replica was chosen, of which was known what was so `age` seconds ago; infinite: the
        router knows nothing that replicas report.
        """
        self.outcomes["sent"] += 1
        if age < math.inf:
            self.knowledge_age.observe(age)


def render(all_metrics: Sequence[RouterMetrics], counted: Sequence[Counted] = ()) -> bytes:
    """The metrics of routers in Prometheus text format, with what the HTTP server has counted."""
    registry = CollectorRegistry()
    registry.register(_Collected(all_metrics, counted))
    return bytes(generate_latest(registry))


class _Collected(Collector):
    def __init__(self, all_metrics: Sequence[RouterMetrics], counted: Sequence[Counted]) -> None:
        self._all = all_metrics
        self._counted = counted

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all routers, for one scrape by the registry."""
        own = ["model", "router"]
        decisions = CounterMetricFamily(
            "aioserve_router_decisions",
            "Answers of the router, by what became of them",
            labels=[*own, "outcome"],
        )
        refusals = CounterMetricFamily(
            "aioserve_router_refusals", "Requests that the router refused", labels=[*own, "reason"]
        )
        resent = CounterMetricFamily(
            "aioserve_router_resent_requests",
            "Requests sent again, since their replica was gone before it told anything",
            labels=own,
        )
        moved = CounterMetricFamily(
            "aioserve_router_moved_requests",
            "Requests with which another replica went on",
            labels=own,
        )
        replicas = GaugeMetricFamily(
            "aioserve_router_replicas", "Replicas that can be sent requests", labels=own
        )
        seconds = HistogramMetricFamily(
            "aioserve_router_decision_seconds", "One question to the router", labels=own
        )
        age = HistogramMetricFamily(
            "aioserve_router_knowledge_age_seconds",
            "Since the chosen replica reported what the router knew of it",
            labels=own,
        )
        for one in self._all:
            labels = one.labels
            for outcome, count in one.outcomes.items():
                decisions.add_metric([*labels, outcome], count)
            for reason, count in one.refusals.items():
                refusals.add_metric([*labels, reason], count)
            resent.add_metric(labels, one.num_resent)
            moved.add_metric(labels, one.num_moved)
            replicas.add_metric(labels, one.get_num_replicas())
            for family, histogram in ((seconds, one.decision_seconds), (age, one.knowledge_age)):
                family.add_metric(labels, histogram.cumulative(), histogram.total)
        yield from (decisions, refusals, resent, moved, replicas, seconds, age)
        for told in self._counted:
            kind = GaugeMetricFamily if told.is_gauge else CounterMetricFamily
            labels_of = [*told.labels, "process"]
            counts = kind(f"aioserve_{told.name}", told.documentation, labels=labels_of)
            for values, count in told.counts:
                counts.add_metric([*values, "ingress"], count)
            yield counts
