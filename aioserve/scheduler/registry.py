"""The policies that there are, by name or file, and their options.

`load_policy` finds a class by installed name, by `package.module:Class`, or by `file.py`: built-in
policies and those of other packages come through the same door. How they describe themselves is in
`descriptions`.
"""

from importlib.metadata import EntryPoint
from typing import Any

from aioserve.errors import ConfigError, UnknownPolicyError
from aioserve.scheduler.interface import POLICY_API, PolicyOptions, SchedulerInterface
from aioserve.support.plugins import (
    GROUP,
    Kind,
    convert_options,
    has_no_dot,
    installed,
    is_zoo_name,
    zoo_entry_points,
)


def available_policies() -> dict[str, EntryPoint]:
    """Installed policies by name, also `zoo.srpt`; `ConfigError` if two packages claim one name."""
    return installed(GROUP, "policy", zoo_entry_points())


#: Schedulers of other engines, by names that no list shows: each needs the package of its engine.
FOREIGN = {"vllm": "aioserve.vllm.foreign:VLLMScheduler"}

_POLICY = Kind(
    word="policy",
    words="policies",
    interface=SchedulerInterface,  # type: ignore[type-abstract]
    base="BaseScheduler",
    available=available_policies,
    is_name=lambda spec: has_no_dot(spec) or is_zoo_name(spec),
    unknown=UnknownPolicyError,
)


def load_policy(spec: str) -> type[SchedulerInterface]:
    """Return the policy class that `spec` names; a file is read anew each time. No class: the only
    one.

    Raises `UnknownPolicyError` that lists what there is, or `ConfigError` if it is no scheduler or
    cannot be imported: then with the file and line of the error, which is the cause.
    """
    policy = _POLICY.load(FOREIGN.get(spec, spec))
    version = getattr(policy, "policy_api", POLICY_API)
    if version != POLICY_API:
        remedy = "upgrade aioserve" if version > POLICY_API else "CHANGELOG.md says what changed"
        raise ConfigError(
            f"policy {spec!r} is written for version {version} of the policy API, and this "
            f"aioserve has version {POLICY_API}: {remedy}"
        )
    return policy


def make_options(options: dict[str, Any], kind: Any, owner: str) -> PolicyOptions:
    """Options of type `kind`, a nested class `Options`, from plain data. Raises `ConfigError` that
    names the `owner`, what is wrong and the options that there are.
    """
    return convert_options(options, kind, PolicyOptions, owner)
