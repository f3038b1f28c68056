"""Compiled passes of layers that keep a state between tokens, over B pieces of L tokens.

Gated delta rule, Mamba 2, Mamba 1, causal convolutions, gated norms: thin calls into C, as in
`aioserve.kernels`. States but those of convolutions are float32, and so are all sums. Knows shapes,
strides and pointers; knows no models.
"""

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from aioserve.kernels.library import KernelsUnavailableError, choose_variant, open_library

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
MULTIPLE = 16  # numbers in a row of a state, and channels
MOST_NUMBERS = 256  # of a key of the gated delta rule, and of a head and state of Mamba 2
MOST_TAPS = 16  # of a convolution, and inputs that it keeps
#: By the types of elements that kernels take: keep in step with src/any_element.h.
ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@functools.cache
def load_state_steps() -> "StateSteps":
    """Return the passes for this CPU, loaded once. Raises `KernelsUnavailableError`."""
    return StateSteps(choose_variant())


def _place(x: Tensor) -> tuple[int, int, int]:
    """Return the address of a tensor [B, L, ...], and the strides of its rows and tokens."""
    return x.data_ptr(), x.stride(0), x.stride(1)


class StateSteps:
    """One variant of the library. Nothing is checked per call: tensors are contiguous, but that
    states [B, ...] may be a slice of more rows, and where strides are spoken of, rows and tokens
    may lie apart.
    """

    def __init__(self, variant: str) -> None:
        """Raises `KernelsUnavailableError`, also of a library built before these passes."""
        library = open_library(variant)

        def function(name: str, *signature: Any) -> Any:
            if (found := getattr(library, name, None)) is None:
                raise KernelsUnavailableError(
                    f"{variant} was built without {name}: make -B install"
                )
            found.argtypes, found.restype = signature, None
            return found

        rows = (_P, _I, _I)  # of a tensor whose rows and tokens may lie apart
        self._gated_delta = function(
            "gated_delta", _P, _I, *rows * 3, _I, _P, _P, _P, *[_I] * 7, _F
        )
        self._state_space = function("state_space", _P, _I, *rows * 3, _I, *[_P] * 4, *[_I] * 6)
        self._scan = function("selective_scan", _P, _I, *[_P] * 7, *[_I] * 4)
        self._conv = function("causal_conv", *rows, _I, _P, _P, _I, _P, *[_I] * 4)
        self._conv_step = function(
            "causal_conv_step", _P, _I, _P, _I, _I, _P, _P, _I, _P, *[_I] * 4
        )
        self._gated_norm = function("gated_norm", _P, _P, _I, _I, _P, _I, _I, _F, _I, _P, *[_I] * 3)

    def gated_delta(
        self,
        states: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        out: Tensor,
        *,
        is_normalized: bool,
        scale: float,
    ) -> None:
        """`states` [B, Hv, Dk, Dv] change in place; `query` and `key` [B, L, Hk, Dk], `value` and
        `out` [B, L, Hv, Dv], these four of one type, `decay` and `beta` [B, L, Hv] float32. Rows
        and tokens of the first three may lie apart. Queries are multiplied by `scale`; queries and
        keys are divided by their lengths before, if they are to be `is_normalized`.
        """
        rows, value_heads, key_dim, value_dim = states.shape
        self._gated_delta(
            states.data_ptr(),
            states.stride(0),
            *_place(query),
            *_place(key),
            *_place(value),
            ELEMENTS[value.dtype],
            *(x.data_ptr() for x in (decay, beta, out)),
            rows,
            key.shape[1],
            key.shape[2],
            value_heads,
            key_dim,
            value_dim,
            is_normalized,
            scale,
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
        """Mamba 2. `states` [B, H, P, N] change in place; `x` and `out` [B, L, H, P], `b` and `c`
        [B, L, groups, N], these four of one type, `decay` and `dt` [B, L, H], `d` [H] float32. Rows
        and tokens of `x`, `b` and `c` may lie apart.
        """
        rows, heads, head_dim, size = states.shape
        self._state_space(
            states.data_ptr(),
            states.stride(0),
            *_place(x),
            *_place(b),
            *_place(c),
            ELEMENTS[x.dtype],
            *(t.data_ptr() for t in (decay, dt, d, out)),
            rows,
            x.shape[1],
            heads,
            head_dim,
            b.shape[2],
            size,
        )

    def conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, has_silu: bool, out: Tensor
    ) -> None:
        """Causal convolution of each channel, in front of which are zeros: `x`, whose rows and
        tokens may lie apart, and `out` [B, L, channels], `weight` [taps, channels], `bias`
        [channels], both float32.
        """
        rows, tokens, channels = x.shape
        self._conv(
            *_place(x),
            ELEMENTS[x.dtype],
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            has_silu,
            out.data_ptr(),
            rows,
            tokens,
            channels,
            len(weight),
        )

    def conv_step(
        self,
        states: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        has_silu: bool,
        out: Tensor,
    ) -> None:
        """One token behind `states` [B, channels, width], the last inputs, which change in place:
        `x`, whose rows may lie apart, and `out` [B, channels], `weight` [channels, taps], `bias`
        [channels], all of one type.
        """
        rows, channels, width = states.shape
        self._conv_step(
            states.data_ptr(),
            states.stride(0),
            x.data_ptr(),
            x.stride(0),
            ELEMENTS[x.dtype],
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            has_silu,
            out.data_ptr(),
            rows,
            channels,
            weight.shape[1],
            width,
        )

    def gated_norm(
        self,
        x: Tensor,
        gate: Tensor,
        weight: Tensor,
        eps: float,
        size: int,
        is_gated_first: bool,
        out: Tensor,
    ) -> None:
        """Root mean square norms of every `size` numbers of a row, multiplied by `weight`, whose
        size is a divisor of a row's, and by silu of the gate: the input if `is_gated_first`, else
        what is normed. `x`, `gate`, whose rows may lie apart, and `out` [N, row], of one type.
        """
        rows, width = x.shape
        self._gated_norm(
            x.data_ptr(),
            gate.data_ptr(),
            gate.stride(0),
            ELEMENTS[x.dtype],
            weight.data_ptr(),
            ELEMENTS[weight.dtype],
            len(weight) // size,
            eps,
            is_gated_first,
            out.data_ptr(),
            rows,
            width // size,
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
