"""Compiled choice of tokens: greedy, or a draw by temperature, top-k, top-p and min-p.

A library apart from the other kernels, which take a minute to compile: where it is missing, or of
other sources, tokens are chosen by torch and numpy, and are the same. Knows numbers and pointers;
what the numbers of a draw mean is defined in `runner.batch.sampling_columns`.
"""

import ctypes
import hashlib
import logging
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from aioserve.kernels import KernelsUnavailableError, load_kernels
from aioserve.kernels.library import SOURCES, VARIANTS, extension

logger = logging.getLogger(__name__)

_P, _I = ctypes.c_void_p, ctypes.c_int64
_number_in: Callable[[Any], ctypes.c_int64] = ctypes.c_int64.from_buffer
_SOURCES = (SOURCES / "vector.h", SOURCES / "tokens" / "choose_tokens.c")
#: Best first; setup.py compiles each.
TOKEN_VARIANTS = ("avx512", "avx2", "baseline")


class ChosenTokens(NamedTuple):
    """The tokens that were chosen from S rows of logits."""

    token_ids: npt.NDArray[np.int64]  # S
    #: S, the largest logit; NaN if there is any. None: all are finite.
    best: npt.NDArray[np.float32] | None
    is_open: npt.NDArray[np.bool_] | None  # S, rows without a token yet; None: there is none


class LogitMaxima(NamedTuple):
    """The places of logits [S, V], float32, and of the largest of each `width` of them: [V / width
    rounded up, S], NaN where there is one. The head writes both; `choose` then reads few logits.
    """

    logits: int  # an address
    rows: int
    size: int
    maxima: int  # an address
    width: int  # divides 256

    @classmethod
    def attach(cls, logits: Tensor, width: int) -> "LogitMaxima":
        """Say that the maxima lie behind `logits`, which do not change once the head has written
        them. Only this tensor knows it: no part of it does, and no copy.
        """
        rows, size = logits.shape
        address = logits.data_ptr()
        found = cls(address, rows, size, address + logits.itemsize * rows * size, width)
        setattr(logits, _MAXIMA, found)
        return found

    @staticmethod
    def of(logits: Tensor) -> "LogitMaxima | None":
        """Return what was attached to `logits`."""
        return getattr(logits, _MAXIMA, None)


_MAXIMA = "maxima"  # of a tensor


class TokenChooser:
    """One variant of the library."""

    def __init__(self, path: Path) -> None:
        """Raises `OSError` if the library is not there, or is of other sources."""
        library = ctypes.CDLL(str(path))
        if _is_stale(library):
            raise OSError(f"{path.name} was compiled from other sources: compile it again (make)")
        self._choose = library.choose_tokens
        self._choose.argtypes = (_P, _I, _I, _P, _I, *[_P] * 9)
        self._greedy = _greedy_rows(1)

    def choose(self, logits: Tensor, draws: Sequence[int] | None) -> ChosenTokens:
        """Return a token for each row of `logits` [S, V], of any floating type: the first of the
        best where its temperature is 0, else a draw. On as many threads as the calling thread gave
        torch. With `LogitMaxima` few of the logits are read.

        `draws` are the addresses of six contiguous columns: temperature [S], float32; top-k [S],
        int64, 0 for all; top-p [S], float32; log(min-p) [S], float32, of (logit - best logit) /
        temperature; seeds [S, 2], uint32, low and high word; positions [S], int64, of the token
        that is chosen. None: every temperature is 0.

        A row stays open where rounding may decide which token it is, and beyond a top-k of 256.
        Rows whose best is not finite are not drawn from.
        """
        if (known := LogitMaxima.of(logits)) is None:
            logits = logits.float().contiguous()
            known = LogitMaxima(logits.data_ptr(), logits.shape[0], logits.shape[1], 0, 0)
        rows = known.rows
        if draws is None:
            zeros, columns = self._greedy  # kept here: another thread may take more meanwhile
            if len(zeros) < rows:
                zeros, columns = self._greedy = _greedy_rows(rows)
        else:
            columns = draws
        # In one piece of memory, of which the buffer says sooner than `ctypes.data` where it lies.
        found = np.empty(3 * rows + 1, dtype=np.int64)
        address = ctypes.addressof(_number_in(found))
        told = self._choose(*known, *columns, address, address + 8 * rows, address + 16 * rows)
        best = found[rows : 2 * rows].view(np.float32)[:rows] if told & 2 else None
        is_open = found[2 * rows :].view(np.bool_)[:rows] if told & 1 else None
        return ChosenTokens(found[:rows], best, is_open)


def _greedy_rows(rows: int) -> tuple[npt.NDArray[np.float32], Sequence[int | None]]:
    """Return temperatures of 0, and the addresses that say so."""
    zeros = np.zeros(rows, dtype=np.float32)
    return zeros, (zeros.ctypes.data, None, None, None, None, None)


@cache
def load_chooser() -> TokenChooser | None:
    """Return the best variant for this CPU, or for that of AIOSERVE_KERNELS. None without kernels,
    whose OpenMP runtime it shares, and where it was not compiled of the sources beside it.
    """
    try:
        return TokenChooser(library_for(load_kernels().variant))
    except (KernelsUnavailableError, OSError) as error:
        logger.info("tokens are chosen without the compiled library: %s", error)
        return None


def library_for(variant: str) -> Path:
    """Return the path of the library, if it was built, that goes with a variant of the kernels."""
    flags = VARIANTS[variant]
    return extension("tokens_" + next(name for name in TOKEN_VARIANTS if VARIANTS[name] <= flags))


def _is_stale(library: ctypes.CDLL) -> bool:
    """Return whether the sources beside it, which only a checkout has, are others."""
    if not all(path.exists() for path in _SOURCES):
        return False
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in _SOURCES)).hexdigest()
    try:
        return (ctypes.c_char * 64).in_dll(library, "sources_digest").value.decode() != digest
    except ValueError:
        return True
