"""Finds a policy class by installed name, by `package.module:Class`, or by `file.py`.

Built-in policies and those of strangers come through the same door. Imports nothing but the one
policy that is asked for.
"""

from importlib.metadata import EntryPoint

from aioserve.errors import ConfigError, UnknownPolicyError
from aioserve.installed import installed
from aioserve.named_class import Kind, has_no_dot
from aioserve.scheduler.interface import POLICY_API, SchedulerInterface
from aioserve.zoo import GROUP, is_zoo_name, zoo_entry_points


def available_policies() -> dict[str, EntryPoint]:
    """Installed policies by name, also `zoo.srpt`; `ConfigError` if two packages claim one name."""
    return installed(GROUP, "policy", zoo_entry_points())


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
    """The policy class that `spec` names; a file is read anew each time. No class: the only one.

    Raises `UnknownPolicyError` that lists what there is, or `ConfigError` if it is no scheduler or
    cannot be imported: then with the file and line of the error, which is the cause.
    """
    policy = _POLICY.load(spec)
    version = getattr(policy, "policy_api", POLICY_API)
    if version != POLICY_API:
        remedy = "upgrade aioserve" if version > POLICY_API else "CHANGELOG.md says what changed"
        raise ConfigError(
            f"policy {spec!r} is written for version {version} of the policy API, and this "
            f"aioserve has version {POLICY_API}: {remedy}"
        )
    return policy
