"""The standard of the zoo: six workloads, their seeds, and the machine that they are simulated on.

Frozen under a version and a digest, so that numbers of two papers can be compared: what changes one
of them is a new version. Knows what is run; runs nothing.
"""

from hashlib import sha256
from typing import Any

import msgspec

from aioserve.lab.comparison.candidates import Candidate, load_candidates, prepare
from aioserve.lab.workloads.source import WorkloadSource
from aioserve.lab.workloads.workload import Workload
from aioserve.runner.profile import load_profile
from aioserve.scheduler import available_policies, load_policy
from aioserve.shipped import config_names

VERSION = "zoo-1"
#: What `standard_digest` says of this version; a test holds them together.
DIGEST = "35367d32700d7b73"
WORKLOADS = ("chat", "code", "documents", "agents", "offline", "tenants")
SEEDS = (1, 2, 3, 4, 5)
BUDGET = "scheduler.max_num_batched_tokens"
#: How a run is scored; a part of the standard, as all that follows.
SCORING = "share in time: mean over classes of the requests and programs within their limits"
#: Laid over the settings of every policy: the machine, its memory, its seats, and the tokens of a
#: step, which may be more for a policy that runs whole prompts: as many as the longest request has.
SETTINGS: tuple[tuple[str, Any], ...] = (
    ("runner.profile", VERSION),
    ("cache.block_size", "16"),
    ("cache.num_kv_blocks", "3000"),
    ("scheduler.max_num_seqs", "128"),
    (BUDGET, "512"),
)


def load_workload(name: str, seed: int) -> Workload:
    """A standard workload for one of the `SEEDS`."""
    return WorkloadSource(path=f"{VERSION}-{name}").load(seed)


def policy_names() -> list[str]:
    """The policies that come with aioserve and have a configuration of their name, sorted; without
    `composed`, which is what its parts are.
    """
    return sorted((available_policies().keys() & config_names()) - {"composed"})


def load_policies(names: list[str]) -> list[Candidate]:
    """Configurations on the standard machine, by policy, file or name. Raises `ConfigError`."""
    return [_with_whole_prompts(candidate) for candidate in load_candidates(names, SETTINGS)]


def _with_whole_prompts(candidate: Candidate) -> Candidate:
    """The candidate without a budget for steps, if its policy runs whole prompts."""
    scheduler = candidate.config.scheduler
    if not getattr(load_policy(scheduler.policy), "runs_whole_prompts", False):
        return candidate
    scheduler = msgspec.structs.replace(scheduler, max_num_batched_tokens=None)
    config = msgspec.structs.replace(candidate.config, scheduler=scheduler)
    return msgspec.structs.replace(candidate, config=config)


def prepared(candidate: Candidate, workload: Workload) -> Candidate:
    """The candidate with limits that fit the longest request of the workload."""
    [ready], _, _ = prepare([candidate], [workload], is_live=False, clip=False)
    return ready


def standard_digest() -> str:
    """A short name for all requests of all seeds, their service levels, the profile and the
    settings.
    """
    model = msgspec.structs.replace(load_profile(VERSION), source="", error="")
    found = sha256(repr((SCORING, SETTINGS, _stated(model))).encode())
    for name in WORKLOADS:
        for seed in SEEDS:
            workload = load_workload(name, seed)
            classes = {kind: _stated(slo) for kind, slo in workload.classes.items() if slo}
            found.update(repr((name, seed, classes, workload.weights)).encode())
            for request in workload.requests:
                found.update(repr(_stated(request)).encode())
    return found.hexdigest()[:16]


def _stated(struct: msgspec.Struct) -> list[tuple[str, Any]]:
    """Fields that are not at their defaults, so that a new field changes nothing; times to the
    microsecond, because libraries of mathematics differ in last digits.
    """
    return [
        (field.name, round(value, 6) if isinstance(value, float) else msgspec.to_builtins(value))
        for field in msgspec.structs.fields(struct)
        if (value := getattr(struct, field.name)) != field.default
    ]
