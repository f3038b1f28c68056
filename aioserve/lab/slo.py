"""What a request must not exceed to count as good: the limits behind goodput.

Knows how they are written and kept. Measures nothing.
"""

from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.errors import ConfigError


class Slo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a request must not exceed to count as good, in seconds; None: any."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """Parse limits in seconds such as `ttft=0.5,tpot=0.05`. Raises `ConfigError`."""
        try:
            pairs = dict(part.strip().split("=", 1) for part in text.split(",") if part.strip())
            slo = msgspec.convert(pairs, cls, strict=False)
        except (ValueError, msgspec.ValidationError) as error:
            raise ConfigError(
                f"an SLO looks like ttft=0.5,tpot=0.05,e2e=10 (seconds), got {text!r}: {error}"
            ) from error
        if not any(limit is not None and limit > 0 for limit in msgspec.structs.astuple(slo)):
            raise ConfigError(f"the SLO {text!r} sets no limit above 0")
        return slo

    def is_met(self, durations: Mapping[str, npt.NDArray[np.float64]]) -> npt.NDArray[np.bool_]:
        """By request, from its seconds by name. What is undefined, such as the time per token of a
        reply of one, misses no limit.
        """
        met: npt.NDArray[np.bool_] = np.full(len(durations["e2e"]), True)
        for name, limit in msgspec.structs.asdict(self).items():
            if limit is not None:
                met &= ~(durations[name] > limit)
        return met
