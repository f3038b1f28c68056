"""What not every model or request needs: each folder is one feature, loaded when asked for."""

from collections.abc import Mapping
from typing import Any

BRINGS: Mapping[str, Mapping[Any, str]] = {}
