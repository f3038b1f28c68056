"""The metrics of keys, and of what was refused, of the whole server: for a scrape of /metrics."""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from aioserve.server.access.accounts import Accounts
from aioserve.server.access.keys import Key


def key_metrics(
    refusals: Mapping[tuple[str, str], int], keys: Sequence[Key], accounts: Accounts | None
) -> Iterator[Metric]:
    """Yield metrics of refused requests, and of what each key used; `accounts` is None without
    keys.
    """
    refused = CounterMetricFamily(
        "aioserve_requests_refused",
        "Requests answered with an error, by reason and key",
        labels=["reason", "key"],
    )
    for (reason, name), count in refusals.items():
        refused.add_metric([reason, name], count)
    yield refused
    if accounts is None:
        return
    tokens = CounterMetricFamily(
        "aioserve_key_tokens", "Tokens of prompts and outputs, by key", labels=["key"]
    )
    running = GaugeMetricFamily(
        "aioserve_key_requests_running",
        "Sequences of requests that run, of keys that have limits",
        labels=["key"],
    )
    for key in keys:
        tokens.add_metric([key.name], accounts.num_tokens[key.name])
        if key.is_counted:
            running.add_metric([key.name], accounts.num_running(key.name))
    yield tokens
    yield running
