"""Steps on graphics cards: CUDA, and one model on several ranks."""

from collections.abc import Mapping
from typing import Any

BRINGS: Mapping[str, Mapping[Any, str]] = {}
