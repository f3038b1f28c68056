// Norms of heads by their root mean square, with a gate before or behind them.
#pragma once
#include "any_element.h"

// x, gate and out [rows, groups, size], rows of gate `gate_row` apart, the others in one piece; the
// norm is of each group, weight [weight_groups, size] repeats. With `is_first`, x silu(gate) is
// normed; else what is normed is multiplied by silu(gate). size is a multiple of 16.
INLINE void gate_groups(const void *x, const void *gate, int64_t gate_row, int64_t type,
                        const void *weight, int64_t weight_type, int64_t weight_groups, float eps,
                        int64_t is_first, void *out, int64_t rows, int64_t groups, int64_t size) {
#pragma omp parallel for if (rows * groups * size >= STATES_PARALLEL_FROM / 2)
    for (int64_t i = 0; i < rows * groups; i++) {
        int64_t at = i * size, by = i / groups * gate_row + i % groups * size;
        int64_t own = i % groups % weight_groups * size;
        vf squares = splat(0);
        for (int64_t j = 0; j < size; j += W) {
            vf v = load_any(x, at + j, type);
            if (is_first) v *= silu_(load_any(gate, by + j, type));
            squares = multiply_add(v, v, squares);
        }
        vf scale = splat(1.f / __builtin_sqrtf(sum(squares) / size + eps));
        for (int64_t j = 0; j < size; j += W) {
            vf v = load_any(x, at + j, type), open = silu_(load_any(gate, by + j, type));
            if (is_first) v *= open;
            v *= scale * load_any(weight, own + j, weight_type);
            store_any(out, at + j, type, is_first ? v : v * open);
        }
    }
}

void gated_norm(const void *x, const void *gate, int64_t gate_row, int64_t type, const void *weight,
                int64_t weight_type, int64_t weight_groups, float eps, int64_t is_first, void *out,
                int64_t rows, int64_t groups, int64_t size) {
#define GROUPS(type)                                                                            \
    gate_groups(x, gate, gate_row, type, weight, weight_type, weight_groups, eps, is_first, out, \
                rows, groups, size)
    if (type == ANY_F32) GROUPS(ANY_F32);
    else if (type == ANY_BF16) GROUPS(ANY_BF16);
    else GROUPS(ANY_F16);
#undef GROUPS
}
