"""The policies that come with aioserve: the nine, and the zoo, which has tests of its own."""

from aioserve.scheduler import available_policies
from aioserve.zoo import is_zoo_name

SHIPPED = sorted(name for name in available_policies() if not is_zoo_name(name))
ZOO = sorted(name for name in available_policies() if is_zoo_name(name))
