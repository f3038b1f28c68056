"""Roles of replicas: prompts, replies, or all. Checked where fleets are described."""

from collections.abc import Iterable

from aioserve.errors import ConfigError
from aioserve.routing.views import ROLES


def check_roles(roles: Iterable[str]) -> None:
    """Raises `ConfigError` for a role that there is not, or if no replica would do the other half
    of the work.
    """
    found = set(roles)
    for role in found.difference(ROLES):
        raise ConfigError(f"a role is one of {', '.join(map(repr, ROLES))}, got {role!r}")
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        if role in found and not found & {"", other}:
            raise ConfigError(f"all replicas have the role {role}: none would {other}")
