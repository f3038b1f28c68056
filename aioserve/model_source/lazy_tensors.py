"""Weights that `transformers` takes for slices of a file, and that are read when it loads each.

Knows what a read raised: `transformers` makes a page of it.
"""

from collections.abc import Callable
from threading import Lock
from typing import Any


class LazyReads:
    """Makes what `transformers` takes for a slice of a file, and reads by calling us."""

    def __init__(self) -> None:
        self.error: Exception | None = None  # `transformers` makes a page of it
        self._lock = Lock()  # it reads on several threads

    def __call__(self, read: Callable[[str, Any], Any], name: str, what: Any) -> "_LazyTensor":
        return _LazyTensor(self, read, name, what)


class _LazyTensor:
    def __init__(self, lazy: LazyReads, read: Callable[[str, Any], Any], name: str, what: Any):
        self._lazy, self._read, self._name, self._what = lazy, read, name, what

    def __getitem__(self, _: Any) -> Any:
        with self._lazy._lock:
            try:
                return self._read(self._name, self._what)
            except Exception as error:
                self._lazy.error = self._lazy.error or error
                raise
