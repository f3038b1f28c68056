"""The base of the structs that clients send."""

import msgspec


class RequestPart(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of what clients send. `null` means the default everywhere."""
