"""Several engines as one: child processes, workers, routers, autoscalers, Ray Serve."""

from collections.abc import Mapping
from typing import Any

BRINGS: Mapping[str, Mapping[Any, str]] = {}
