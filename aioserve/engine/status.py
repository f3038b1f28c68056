"""What an engine tells of itself: whether it would serve a request now, and its settings as labels.

Reads the parts of an engine and changes none of them. Knows no request by name.
"""

from typing import Any

import msgspec

from aioserve.config import EngineConfig
from aioserve.engine.builder import EngineParts
from aioserve.engine.metrics import EngineMetrics
from aioserve.engine.operations.command import Health
from aioserve.scheduler import FALLBACK_POLICY, BaseScheduler, SchedulerInterface
from aioserve.support import __version__

# Seconds for which a policy counts as failing whose last step failed: only a request can show that
# it works again. Enough for a client that asks now and then; a guess.
POLICY_FAILURE_SECONDS = 10.0


def policy_error_of(parts: EngineParts | None) -> Exception | None:
    """Return what the policy did wrong, if it has run no step since, not in ten seconds;
    else None.
    """
    if parts is None or parts.core.loop.failures.last is None:
        return None
    error, when = parts.core.loop.failures.last
    return None if parts.clock() - when > POLICY_FAILURE_SECONDS else error


def health_of(parts: EngineParts, config: EngineConfig) -> Health:
    """Return whether an engine that runs would serve a new request now, and if not, why."""
    loop = parts.core.loop
    seconds = parts.core.step_seconds()
    if seconds > config.server.hung_step_seconds:
        return Health("hanging", f"a step has not come back for {seconds:.0f} s")
    if (error := loop.failures.replaced_after) is not None:
        plain = "a plain policy, first come first served, plans in the place of"
        return Health("ready", f"{plain} {config.scheduler.policy}: {error}")
    if (error := policy_error_of(parts)) is not None:
        return Health("failing", str(error))
    seconds = loop.stalled_seconds()
    if seconds > config.scheduler.stall_timeout / 2:
        return Health(
            "stalled",
            f"policy {config.scheduler.policy} has scheduled no request for "
            f"{seconds:.0f} s although requests wait",
        )
    return Health()


def settings_as_labels(
    config: EngineConfig, max_model_len: int, parts: EngineParts | None, metrics: EngineMetrics
) -> dict[str, dict[str, str]]:
    """Return settings as metric labels, with all options of the policy."""
    model = config.model
    info = {
        "model": {
            "model": model.served_name,
            "max_model_len": str(max_model_len),
            "block_size": str(config.cache.block_size),
            "version": __version__,
            "activations": model.activations or "exact",
        }
    }
    if parts is not None:
        settings, policy = config.scheduler, parts.core.loop.scheduler.policy
        if parts.core.loop.failures.replaced_after is not None:
            info["policy"] = _options_as_labels(FALLBACK_POLICY, policy, {})
        else:
            info["policy"] = _options_as_labels(settings.policy, policy, settings.options)
        name, given = config.shadow.shadow_policy, config.shadow.shadow_options
        if name is not None and (shadow := metrics.shadow.shadow) is not None:
            info["shadow_policy"] = _options_as_labels(name, shadow.scheduler.policy, given)
    return info


def _options_as_labels(
    name: str, policy: type[SchedulerInterface], options: dict[str, Any]
) -> dict[str, str]:
    """Return a policy with all its options, defaults included."""
    if issubclass(policy, BaseScheduler):
        options = msgspec.to_builtins(policy.parse_options(options))
    return {"policy": name, **{key: str(value) for key, value in options.items()}}
