"""How much memory prepared images take: those of all requests that wait or run.

An image counts until its last request has ended. Knows sizes. Knows nothing about what is in the
arrays.
"""

import weakref

from aioserve.errors import EngineOverloadedError
from aioserve.request import RequestSpec


class ImageMemory:
    """Memory limit for the prepared images of one engine."""

    def __init__(self, limit: float) -> None:
        """`limit`: most memory for prepared images, in GiB."""
        self._limit = limit
        self.num_bytes = 0

    def hold(self, spec: RequestSpec) -> None:
        """Count the images of a request, once for all its samples. Raises `EngineOverloadedError`
        if they would be too much beside those that are there; alone, any are taken.
        """
        arrays = [array for item in spec.encoder_inputs for array in (item.arrays or {}).values()]
        num_bytes = sum(array.nbytes for array in arrays)
        if arrays and self.num_bytes and self.num_bytes + num_bytes > self._limit * 2**30:
            raise EngineOverloadedError(
                f"prepared images of requests take {self.num_bytes / 2**20:.0f} MiB; "
                f"{num_bytes / 2**20:.0f} MiB more would be over image_memory_gib "
                f"({self._limit:g})"
            )
        self.num_bytes += num_bytes
        for array in arrays:
            weakref.finalize(array, self._release, array.nbytes).atexit = False

    def _release(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
