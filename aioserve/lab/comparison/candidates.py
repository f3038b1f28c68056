"""The candidates of a comparison: configurations by name, and what they differ in.

Knows files, policies and settings. Runs nothing.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.lab.simulation.run import check_fits, simulated
from aioserve.lab.workloads.workload import Workload
from aioserve.model_source.info import ModelInfo
from aioserve.runner.step_times import machine_in_words, step_times
from aioserve.scheduler import BaseScheduler, available_policies, load_policy
from aioserve.scheduler.registry import FOREIGN
from aioserve.support.files import config_names, find_config, read_yaml
from aioserve.support.plugins import is_zoo_name

if TYPE_CHECKING:
    from aioserve.lab.simulation.fleet_plan import Fleet, FleetSpec

# They change which clients are served and where, and what is noted, not how requests are scheduled.
IGNORED_SECTIONS = ("server", "shadow")
IGNORED_SETTINGS = ("scheduler.policy", "scheduler.decision_log", "scheduler.request_log")
# Options of policies that say what clients are due: a number each.
WEIGHT_OPTIONS = ("weights", "tickets")


class Candidate(msgspec.Struct, frozen=True):
    """A configuration that takes part, under a short name: of one engine, or of a whole fleet."""

    name: str
    config: EngineConfig
    fleet: "Fleet | None" = None


def load_candidates(
    paths: Sequence[str],
    overrides: Sequence[tuple[str, Any]] = (),
    defaults: Sequence[tuple[str, Any]] = (),
) -> list[Candidate]:
    """Named after their files; `overrides` are laid over all, `defaults` where a configuration
    leaves a setting at its default. Raises `ConfigError`.

    A policy stands for the default settings with it: `file.py`, `file.py:Class`, `module:Class`, or
    the name of one that was installed and has no configuration of its own.
    """
    stems = [_stem(path) for path in paths]
    names = stems if len(set(stems)) == len(stems) else list(paths)
    names = [
        name if names.index(name) == i else f"{name} ({names[: i + 1].count(name)})"
        for i, name in enumerate(names)
    ]
    return [
        Candidate(name, _load(path, overrides, defaults))
        for name, path in zip(names, paths, strict=True)
    ]


def _stem(path: str) -> str:
    if ":" in path:
        return path.rpartition(":")[2]
    return path if is_zoo_name(path) else Path(path).stem


def in_fleet(candidates: list[Candidate], spec: "FleetSpec") -> list[Candidate]:
    """Return each configuration behind each router, with each autoscaler, under the names of what
    differs.
    """
    found = []
    for candidate in candidates:
        for choice, scaler in product(spec.choices, spec.scalers):
            is_one = len(spec.routers) == len(spec.scalers) == 1
            words = [candidate.name] if len(candidates) > 1 or is_one else []
            words += [choice.shown] if len(spec.routers) > 1 else []
            words += [scaler.shown] if scaler is not None and len(spec.scalers) > 1 else []
            found.append(Candidate(" ".join(words), candidate.config, spec.behind(choice, scaler)))
    return found


def with_whole_prompts(candidate: Candidate) -> Candidate:
    """Return the candidate without a budget for steps, if its policy runs whole prompts."""
    scheduler = candidate.config.scheduler
    if not getattr(load_policy(scheduler.policy), "runs_whole_prompts", False):
        return candidate
    scheduler = msgspec.structs.replace(scheduler, max_num_batched_tokens=None)
    return _with_config(candidate, msgspec.structs.replace(candidate.config, scheduler=scheduler))


def settings_of(name: str) -> list[tuple[str, Any]]:
    """Return what a file of settings states, by dotted names. Raises `ConfigError`."""
    path = find_config(name)
    EngineConfig.load(path)  # says what is wrong with it
    return list(_flat(read_yaml(path, "config") or {}).items())


def _load(
    path: str, overrides: Sequence[tuple[str, Any]], defaults: Sequence[tuple[str, Any]]
) -> EngineConfig:
    if defaults:
        own, usual = (_flat(msgspec.to_builtins(c)) for c in (_load(path, (), ()), EngineConfig()))
        left = [(name, value) for name, value in defaults if own.get(name) == usual.get(name)]
        overrides = [*left, *overrides]
    is_policy = ":" in path or path.endswith(".py") or path in FOREIGN
    if is_policy or (path in available_policies() and path not in config_names()):
        return EngineConfig.load(None, [("scheduler.policy", path), *overrides])
    return EngineConfig.load(path, overrides)


def other_differences(first: EngineConfig, second: EngineConfig) -> list[str]:
    """Return settings in which two configurations differ besides the policy, and options that both
    policies have with different values, stated or not.
    """
    a, b = _flat(msgspec.to_builtins(first)), _flat(msgspec.to_builtins(second))
    mine, others = options_of(first), options_of(second)
    return [
        f"{name} ({a.get(name)} against {b.get(name)})"
        for name in sorted(a | b)
        if a.get(name) != b.get(name)
        and name.split(".")[0] not in IGNORED_SECTIONS
        and name not in IGNORED_SETTINGS
        and not name.startswith("scheduler.options")
    ] + [
        f"scheduler.options.{name} ({mine[name]} against {others[name]})"
        for name in sorted(mine.keys() & others.keys())
        if mine[name] != others[name]
    ]


def options_of(config: EngineConfig) -> dict[str, Any]:
    """Return the options of a policy: its defaults, and those that the configuration states
    instead. Raises `ConfigError` for an option that the policy refuses.
    """
    stated = config.scheduler.options
    policy = load_policy(config.scheduler.policy)
    if not issubclass(policy, BaseScheduler):
        return stated
    effective: dict[str, Any] = msgspec.to_builtins(policy.parse_options(stated))
    return effective


def prepare(
    candidates: list[Candidate], workloads: list[Workload], *, is_live: bool, clip: bool
) -> tuple[list[Candidate], list[Workload], list[str]]:
    """Candidates and workloads that fit each other, and what had to be done for that.

    Raises `ConfigError` if a request can never run under some candidate.
    """
    notes = []
    if clip:
        limit = min(ModelInfo(c.config.model).max_model_len for c in candidates)
        clipped = [workload.clipped(limit) for workload in workloads]
        workloads = [workload for workload, _ in clipped]
        if num := sum(count for _, count in clipped):
            notes.append(f"{num} requests were shortened to {limit} tokens.")
    if not is_live:
        longest = max(workload.longest for workload in workloads)
        raised = [_with_config(c, simulated(c.config, longest)) for c in candidates]
        if raised != [_with_config(c, simulated(c.config)) for c in candidates]:
            notes.append(
                f"max_model_len is {longest}, the longest request: the configurations leave it "
                "open, and what is simulated has no positions."
            )
        candidates = raised
        for candidate in candidates:
            for workload in workloads:
                check_fits(candidate.config, workload)
                if candidate.fleet is not None:
                    candidate.fleet.check(candidate.config, workload)
                    for config in _configs(candidate):
                        check_fits(config, workload)
    if any(workload.incidents for workload in workloads) and any(
        candidate.fleet is None for candidate in candidates
    ):
        raise ConfigError(
            f"{workloads[0].name} has incidents, which befall replicas: give compare --fleet N"
        )
    return candidates, workloads, notes


def machines(candidates: Sequence[Candidate]) -> list[str]:
    """Return a sentence on each simulated machine: what it is, where its step times come from, how
    well they fit what they were made of, and how right whole runs were that were predicted with
    them; or that they are of no machine. Raises `ConfigError` for a profile that cannot be had.
    """
    configs = [config for candidate in candidates for config in _configs(candidate)]
    said = [machine_in_words(config.runner) for config in configs]
    return list(dict.fromkeys(filter(None, said)))  # in order, once each


def watts_of(candidate: Candidate) -> list[tuple[float, float]] | None:
    """Return what each replica draws while a step runs, and between steps, in watts; None where
    that is not known of all.
    """
    drawn = [step_times(config.runner).watts for config in _configs(candidate)]
    known = [each for each in drawn if each is not None]
    if len(known) < len(drawn):
        return None
    if candidate.fleet is None:
        return known
    groups = candidate.fleet.groups
    if not groups:
        return known * candidate.fleet.num_replicas
    return [w for w, group in zip(known, groups, strict=True) for _ in range(group.replicas)]


def _configs(candidate: Candidate) -> list[EngineConfig]:
    """Return the settings of the engine, or of each group of replicas."""
    fleet = candidate.fleet
    if fleet is None or not fleet.groups:
        return [candidate.config]
    return [group.config(candidate.config) for group in fleet.groups]


def _with_config(candidate: Candidate, config: EngineConfig) -> Candidate:
    return msgspec.structs.replace(candidate, config=config)


def stated_weights(
    candidates: Sequence[Candidate], workload: Workload
) -> tuple[list[dict[str, float]], str]:
    """Return the weights of clients under each candidate, and what states them ("" if nothing
    does). The workload has the first word. Otherwise what one configuration states holds for those
    that state nothing, unless several state different things: then each is measured by its own.
    """
    if workload.weights:
        return [workload.weights] * len(candidates), "the workload"
    own = []
    for candidate in candidates:
        options = candidate.config.scheduler.options
        stated = [options[name] for name in WEIGHT_OPTIONS if isinstance(options.get(name), dict)]
        own.append(
            {
                str(client): float(weight)
                for weights in stated
                for client, weight in weights.items()
                if isinstance(weight, int | float) and weight > 0
            }
        )
    different = [weights for i, weights in enumerate(own) if weights and weights not in own[:i]]
    if len(different) == 1:
        owner = candidates[own.index(different[0])].name
        return different * len(candidates), f"configuration {owner}"
    return own, "each configuration" if different else ""


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found
