"""Names of the zoo: the published policies of `policies/zoo`, each of which is one file.

The file `policies/zoo/srpt.py` is the policy `zoo.srpt`, and `configs/zoo/srpt.yaml` its
configuration; nothing else registers them. Knows where they lie. Imports none of them.
"""

import re
from importlib.metadata import EntryPoint

from aioserve.installed import shipped

PACKAGE = "aioserve.policies.zoo"
PREFIX = "zoo."
GROUP = "aioserve.policies"  # of entry points, by which other packages register policies

# `zoo.py` and `zoo.yaml` are files of a user.
_NAME = re.compile(r"zoo\.(?!(?:py|ya?ml|csv|jsonl)$)[a-zA-Z0-9_-]+")


def is_zoo_name(text: str) -> bool:
    """Whether `text` names a policy of the zoo, such as `zoo.srpt`, be there one or not."""
    return _NAME.fullmatch(text) is not None


def zoo_entry_points() -> list[EntryPoint]:
    """An entry point for each policy of the zoo, sorted by name. Its value names a module, which
    defines one policy.
    """
    return shipped(PACKAGE, GROUP, PREFIX)
