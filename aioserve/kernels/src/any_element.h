// Numbers whose element type is known only when a kernel is called: float32, bfloat16, float16.
#pragma once
#include "vector.h"

// Fewer numbers of states than this are done before the other threads have started.
#define STATES_PARALLEL_FROM 65536

enum { ANY_F32, ANY_BF16, ANY_F16 };  // keep in step with ../state_steps.py

INLINE const void *any_at(const void *p, int64_t i, int64_t type) {
    return (const char *)p + i * (type == ANY_F32 ? 4 : 2);
}

INLINE vf load_any(const void *p, int64_t i, int64_t type) {
    const void *at = any_at(p, i, type);
    return type == ANY_F32 ? load_f32(at) : type == ANY_BF16 ? load_bf16(at) : load_f16(at);
}

INLINE void store_any(void *p, int64_t i, int64_t type, vf v) {
    void *at = (void *)any_at(p, i, type);
    if (type == ANY_F32) store_f32(at, v);
    else if (type == ANY_BF16) store_bf16(at, v);
    else store_f16(at, v);
}

// `n` numbers as floats to a place for whole vectors; what is behind them becomes 0.
INLINE void widen_any(const void *p, int64_t i, int64_t type, float *out, int64_t n) {
    int64_t done = 0;
    for (; done + W <= n; done += W) store_f32(out + done, load_any(p, i + done, type));
    if (done < n) {
        char rest[4 * W] = {0};
        memcpy(rest, any_at(p, i + done, type), (n - done) * (type == ANY_F32 ? 4 : 2));
        store_f32(out + done, load_any(rest, 0, type));
    }
}

INLINE void narrow_any(const float *x, void *p, int64_t i, int64_t type, int64_t n) {
    int64_t done = 0;
    for (; done + W <= n; done += W) store_any(p, i + done, type, load_f32(x + done));
    if (done < n) {
        char rest[4 * W];
        store_any(rest, 0, type, load_f32(x + done));
        memcpy((void *)any_at(p, i + done, type), rest, (n - done) * (type == ANY_F32 ? 4 : 2));
    }
}

INLINE float dot_product(const float *a, const float *b, int64_t n) {
    vf total = splat(0);
    for (int64_t i = 0; i < n; i += W) total = multiply_add(load_f32(a + i), load_f32(b + i), total);
    return sum(total);
}

INLINE vf silu_(vf x) { return x / (exp_(-x) + 1.f); }
