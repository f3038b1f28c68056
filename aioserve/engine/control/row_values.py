"""Whether this engine's runner has the row values that a policy wants: asked before it plans."""

from aioserve.errors import ConfigError
from aioserve.request import ENTROPY, check_names, find_function
from aioserve.runner.info import RunnerInfo
from aioserve.scheduler import BaseScheduler, SchedulerInterface


def check_row_values(policy: type[SchedulerInterface], info: RunnerInfo) -> None:
    """Raises `ConfigError` if the policy wants row values that are not to be had."""
    if not issubclass(policy, BaseScheduler) or not policy.wants_row_values:
        return
    names = check_names(policy.wants_row_values, policy.__name__)
    if not info.gives_row_values:
        raise ConfigError(
            f"policy {policy.__name__} wants row values ({', '.join(names)}), which this engine's "
            "runner does not compute; on a CPU it would (--device cpu)"
        )
    for name in names:
        if name != ENTROPY:
            find_function(name)
