"""Gauges of a policy's own: numbers that it shows on `/metrics` and on the page.

Asked for when somebody looks, never in a step. What is wrong with them costs a line of the log.
"""

import logging
import re
import sys
from typing import Any

from aioserve.errors import FROM_OUTSIDE, PolicyError
from aioserve.scheduler.blame import place
from aioserve.scheduler.succession import Switchable

logger = logging.getLogger(__name__)

MAX_GAUGES = 32  # of one policy
_NAME = re.compile(r"[a-z][a-z0-9_]{0,47}")


class Gauging(Switchable):
    """A scheduler whose policy may show numbers."""

    _told_of_gauges = False  # that they are wrong

    def gauges(self) -> dict[str, float]:
        """Numbers to show on `/metrics` and on the page, by name: at most 32, finite, with names of
        a-z, 0-9 and _ of up to 48 characters. Called when somebody looks, so it must change
        nothing. A name of a tenant is seen by all that see the metrics.
        """
        return {}

    def read_gauges(self) -> dict[str, float]:
        """The gauges of the policy; none if there is something wrong with them, which is logged."""
        if type(self).gauges is Gauging.gauges:
            return {}
        try:
            return checked_gauges(self)
        except PolicyError as error:
            if not self._told_of_gauges:
                self._told_of_gauges = True
                logger.warning("no gauges of the policy are shown: %s", error)
            return {}


def checked_gauges(policy: Gauging) -> dict[str, float]:
    """What `gauges` returns. Raises `PolicyError` if it raises or returns anything else than it
    may.
    """
    name = type(policy).__name__
    try:
        found: Any = policy.gauges()
    except FROM_OUTSIDE:
        raise
    except BaseException as error:
        raise PolicyError(
            f"policy {name} raised {error!r} in gauges(){place(error, type(policy))}"
        ) from error
    if not isinstance(found, dict) or len(found) > MAX_GAUGES:
        what = f"{len(found)} of them" if isinstance(found, dict) else f"{found!r:.80}"
        raise PolicyError(
            f"policy {name}: gauges() must return a dict of up to {MAX_GAUGES} numbers, got {what}"
        )
    for key, value in found.items():
        if not isinstance(key, str) or not _NAME.fullmatch(key):
            raise PolicyError(
                f"policy {name}: gauges() names a gauge {key!r:.80}: names have up to 48 "
                "characters of a-z, 0-9 and _, a letter first"
            )
        if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise PolicyError(
                f"policy {name}: gauge {key!r} must be a finite number, got {value!r:.80}"
            )
    return {key: float(value) for key, value in found.items()}
