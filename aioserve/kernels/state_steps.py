"""Compiled steps of layers that keep a state between tokens: gated delta rule, Mamba 2, Mamba 1.

Thin calls into C on float32 tensors, as in `aioserve.kernels`; sizes of a state are multiples of
16. Knows shapes and pointers; knows no models.
"""

import ctypes
import functools
from typing import Any

from torch import Tensor

from aioserve.kernels.library import KernelsUnavailableError, choose_variant, open_library

_P, _I = ctypes.c_void_p, ctypes.c_int64
MULTIPLE = 16  # numbers in a row of a state


@functools.cache
def load_state_steps() -> "StateSteps":
    """The steps for this CPU, loaded once. Raises `KernelsUnavailableError`."""
    return StateSteps(choose_variant())


class StateSteps:
    """One variant of the library. Nothing is checked per call: tensors are contiguous, but that
    states [B, ...] may be a slice of more rows.
    """

    def __init__(self, variant: str) -> None:
        """Raises `KernelsUnavailableError`, also of a library that was built before these steps."""
        library = open_library(variant)

        def function(name: str, *signature: Any) -> Any:
            if (found := getattr(library, name, None)) is None:
                raise KernelsUnavailableError(
                    f"{variant} was built without {name}: make -B install"
                )
            found.argtypes, found.restype = signature, None
            return found

        self._gated_delta = function("gated_delta_step", _P, _I, *[_P] * 6, *[_I] * 5)
        self._state_space = function("state_space_step", _P, _I, *[_P] * 7, *[_I] * 5)
        self._scan = function("selective_scan", _P, _I, *[_P] * 7, *[_I] * 4)

    def gated_delta(
        self,
        states: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        out: Tensor,
    ) -> None:
        """One token of B rows. `states` [B, Hv, Dk, Dv] change in place; `query` and `key`
        [B, Hk, Dk], `value` and `out` [B, Hv, Dv], `decay` and `beta` [B, Hv].
        """
        rows, value_heads, key_dim, value_dim = states.shape
        self._gated_delta(
            states.data_ptr(),
            states.stride(0),
            *(x.data_ptr() for x in (query, key, value, decay, beta, out)),
            rows,
            key.shape[1],
            value_heads,
            key_dim,
            value_dim,
        )

    def state_space(
        self,
        states: Tensor,
        x: Tensor,
        decay: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor,
        out: Tensor,
    ) -> None:
        """One token of B rows of Mamba 2. `states` [B, H, P, N] change in place; `x` and `out`
        [B, H, P], `decay` and `dt` [B, H], `b` and `c` [B, groups, N], `d` [H].
        """
        rows, heads, head_dim, size = states.shape
        self._state_space(
            states.data_ptr(),
            states.stride(0),
            *(t.data_ptr() for t in (x, decay, dt, b, c, d, out)),
            rows,
            heads,
            head_dim,
            b.shape[1],
            size,
        )

    def scan(
        self,
        states: Tensor,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor,
        out: Tensor,
    ) -> None:
        """L tokens of B rows of Mamba 1. `states` [B, channels, N] change in place; `x`, `dt` and
        `out` [B, L, channels], `a` [channels, N], `b` and `c` [B, L, N], `d` [channels].
        """
        rows, tokens, channels = x.shape
        self._scan(
            states.data_ptr(),
            states.stride(0),
            *(t.data_ptr() for t in (x, dt, a, b, c, d, out)),
            rows,
            tokens,
            channels,
            a.shape[1],
        )
