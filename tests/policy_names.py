"""The policies that come with aioserve: the nine; the zoo and `composed` have their own tests."""

from aioserve.scheduler import available_policies
from aioserve.support.plugins import is_zoo_name

SHIPPED = sorted(n for n in available_policies() if not is_zoo_name(n) and n != "composed")
ZOO = sorted(name for name in available_policies() if is_zoo_name(name))
