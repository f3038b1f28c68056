"""What Linux says is in memory."""

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def address_space() -> int:
    """Of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


def is_resident(cache: Tensor, block_ids: Iterable[int]) -> bool:
    """Whether all pages of these blocks of a cache are in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = cache[0].nbytes
    for block_id in block_ids:
        begin = cache.data_ptr() + block_id * size
        page = begin // mmap.PAGESIZE * mmap.PAGESIZE
        pages = (ctypes.c_ubyte * -(-(begin + size - page) // mmap.PAGESIZE))()
        failed = libc.mincore(ctypes.c_void_p(page), ctypes.c_size_t(begin + size - page), pages)
        assert not failed, os.strerror(ctypes.get_errno())
        if not all(page & 1 for page in pages):
            return False
    return True
