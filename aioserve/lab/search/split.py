"""Which requests options are tuned on, and which others say what the options are worth.

A trace is cut in time: the first part trains, the later one is held out. A description of traffic
makes other requests with each seed: some seeds train, as many others are held out. Or another
workload is held out. Knows nothing of options.
"""

from collections.abc import Sequence

import msgspec

from aioserve.errors import ConfigError
from aioserve.lab.workloads.source import WorkloadSource
from aioserve.lab.workloads.workload import Workload


class Split(msgspec.Struct, frozen=True):
    """The two parts, a workload for each seed, and what they are in words."""

    training: Sequence[Workload]
    held_out: Sequence[Workload]
    words: str


def split(source: WorkloadSource, seeds: Sequence[int], share: float) -> Split:
    """Two parts of one workload. `share` is the part of a trace's time that trains. Raises
    `ConfigError` where a part has no request.
    """
    training = [source.load(seed) for seed in seeds]
    if source.is_trace:
        return _cut(training, share)
    others = range(max(seeds) + 1, max(seeds) + 1 + len(seeds))
    held_out = [source.load(seed) for seed in others]
    words = f"trained on {_named(training)}, held out: {_seeds(held_out)} of it"
    return Split(training, held_out, words)


def two_workloads(
    source: WorkloadSource, seeds: Sequence[int], other: WorkloadSource, other_seeds: Sequence[int]
) -> Split:
    """All of one workload to train on, all of another one held out. Raises `ConfigError` if they
    are the same.
    """
    if other.path == source.path:
        raise ConfigError(f"--held-out {other.path} is the workload that trains; name another one")
    training = [source.load(seed) for seed in seeds]
    held_out = [other.load(seed) for seed in other_seeds]
    return Split(training, held_out, f"trained on {_named(training)}, held out: {_named(held_out)}")


def _cut(whole: Sequence[Workload], share: float) -> Split:
    first = whole[0]
    begin = min((r.arrival for r in first.requests if r.follows < 0), default=0.0)
    at = begin + share * (first.duration - begin)
    if not begin < at < first.duration:
        raise ConfigError(
            f"{first.name}: all requests arrive at once, so that no later part can be held out; "
            "give another workload with --held-out"
        )
    training = [workload.cut(duration=at) for workload in whole]
    held_out = [workload.cut(start=at) for workload in whole]
    sizes = len(training[0].requests), len(held_out[0].requests)
    return Split(
        training,
        held_out,
        f"{first.name}: trained on the {sizes[0]} requests of the first {at:.0f} s, held out: the "
        f"{sizes[1]} after them",
    )


def _named(workloads: Sequence[Workload]) -> str:
    return f"{workloads[0].name} with {_seeds(workloads)}"


def _seeds(workloads: Sequence[Workload]) -> str:
    first, last = workloads[0].seed, workloads[-1].seed
    return f"seed {first}" if first == last else f"seeds {first} to {last}"
