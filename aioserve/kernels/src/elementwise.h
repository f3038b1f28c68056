// Norms, rotary embedding and gated activations on packed tokens. Included once per element type:
// T, LOAD, STORE, NAME. Arithmetic is float32; row lengths are multiples of 16.

// Fewer elements than this are done before the other threads have started.
#ifndef PARALLEL_FROM
#define PARALLEL_FROM 32768
#endif

INLINE void NAME(scale_row)(const T *x, const T *weight, float scale, T *out, int64_t n) {
    for (int64_t i = 0; i < n; i += W) STORE(out + i, LOAD(x + i) * scale * LOAD(weight + i));
}

INLINE float NAME(inverse_rms)(const T *x, int64_t n, float eps) {
    vf squares[2] = {{0}, {0}};
    for (int64_t i = 0; i < n; i += W) {
        vf v = LOAD(x + i);
        squares[i / W % 2] += v * v;
    }
    return 1.f / __builtin_sqrtf(sum(squares[0] + squares[1]) / n + eps);
}

void NAME(rms_norm)(const T *x, const T *weight, float eps, T *out, int64_t rows, int64_t n) {
#pragma omp parallel for if (rows * n >= PARALLEL_FROM)
    for (int64_t row = 0; row < rows; row++) {
        const T *in = x + row * n;
        NAME(scale_row)(in, weight, NAME(inverse_rms)(in, n, eps), out + row * n, n);
    }
}

void NAME(add_rms_norm)(const T *x, T *residual, const T *weight, float eps, T *out, int64_t rows,
                        int64_t n) {
#pragma omp parallel for if (rows * n >= PARALLEL_FROM)
    for (int64_t row = 0; row < rows; row++) {
        T *total = residual + row * n;
        for (int64_t i = 0; i < n; i += W)
            STORE(total + i, LOAD(total + i) + LOAD(x + row * n + i));
        NAME(scale_row)(total, weight, NAME(inverse_rms)(total, n, eps), out + row * n, n);
    }
}

// K or V of one token and head into the cache; what is not finite becomes 0, as a reused block is
// multiplied by 0 where it is masked.
INLINE void NAME(store_finite)(T *slot, const T *x, int64_t n) {
    for (int64_t i = 0; i < n; i += W) {
        vf v = LOAD(x + i);
        STORE(slot + i, (vf)((v - v == 0.f) & (vi)v));
    }
}

// The same as codes. A row whose numbers are all below 1e-30 is 0: their inverse may be infinite.
// Nor may 127 * scale be.
INLINE void NAME(store_row_of_codes)(uint8_t *slot, const T *x, int64_t n) {
    vf top = splat(0);
    for (int64_t i = 0; i < n; i += W) {
        vf v = LOAD(x + i);
        top = maximum((vf)((v - v == 0.f) & (vi)v & 0x7fffffff), top);
    }
    float most = highest(top) < 3.39e38f ? highest(top) : 3.39e38f;
    float scale = most < 1e-30f ? 0 : most / 127;
    float per_number = most < 1e-30f ? 0 : 127 / most;
    for (int64_t i = 0; i < n; i += W) {
        vf v = LOAD(x + i);
        store_codes(slot + i, (vf)((v - v == 0.f) & (vi)v) * per_number);
    }
    memcpy(slot + n, &scale, sizeof scale);
}

INLINE void NAME(store_row)(void *cache, int64_t slot, const T *x, int64_t n, int64_t is_int8) {
    if (is_int8) NAME(store_row_of_codes)((uint8_t *)cache + slot * CODE_ROW(n), x, n);
    else NAME(store_finite)((T *)cache + slot * n, x, n);
}

// W numbers of both halves of a head: optional norm, then rotation.
INLINE void NAME(rotate_part)(T *x, const T *norm, float scale, const float *cos_sin,
                              int64_t half) {
    vf a = LOAD(x), b = LOAD(x + half), cos = load_f32(cos_sin), sin = load_f32(cos_sin + half);
    if (norm) {
        a = a * scale * LOAD(norm);
        b = b * scale * LOAD(norm + half);
    }
    STORE(x, a * cos - b * sin);
    STORE(x + half, b * cos + a * sin);
}

// One head of one token: optional norm over its n numbers, then the rotation of its two halves.
INLINE void NAME(rotate)(T *x, const T *norm, float eps, const float *cos_sin, int64_t n) {
    int64_t half = n / 2, i = 0;
    float scale = norm ? NAME(inverse_rms)(x, n, eps) : 1.f;
    for (; i + W <= half; i += W)
        NAME(rotate_part)(x + i, norm ? norm + i : 0, scale, cos_sin + i, half);
    for (; i < half; i++) {  // heads of 16, 48, 80, ...
        T part[2 * W] = {x[i]}, norm_part[2 * W] = {0};
        float rotation[2 * W] = {cos_sin[i]};
        part[W] = x[half + i];
        rotation[W] = cos_sin[half + i];
        if (norm) norm_part[0] = norm[i], norm_part[W] = norm[half + i];
        NAME(rotate_part)(part, norm ? norm_part : 0, scale, rotation, W);
        x[i] = part[0];
        x[half + i] = part[W];
    }
}

void NAME(rope_store)(T *qkv, const float *cos_sin, const int64_t *positions, const int64_t *slots,
                      void *key_cache, void *value_cache, int64_t tokens, int64_t q_heads,
                      int64_t kv_heads, int64_t key_dim, int64_t value_dim, int64_t block_size,
                      int64_t is_int8, const T *q_norm, const T *k_norm, float eps) {
    int64_t width = (q_heads + kv_heads) * key_dim + kv_heads * value_dim;
#pragma omp parallel for if (tokens * width >= PARALLEL_FROM)
    for (int64_t token = 0; token < tokens; token++) {
        T *head = qkv + token * width;
        const float *rotation = cos_sin + positions[token] * key_dim;
        for (int64_t h = 0; h < q_heads; h++, head += key_dim)
            NAME(rotate)(head, q_norm, eps, rotation, key_dim);
        int64_t block = slots[token] / block_size, offset = slots[token] % block_size;
        for (int64_t h = 0; h < kv_heads; h++, head += key_dim) {
            int64_t slot = (block * kv_heads + h) * block_size + offset;
            NAME(rotate)(head, k_norm, eps, rotation, key_dim);
            NAME(store_row)(key_cache, slot, head, key_dim, is_int8);
        }
        for (int64_t h = 0; h < kv_heads; h++, head += value_dim) {
            int64_t slot = (block * kv_heads + h) * block_size + offset;
            NAME(store_row)(value_cache, slot, head, value_dim, is_int8);
        }
    }
}

// `x` [tokens, heads, n] with any strides of its first two axes, into a cache.
void NAME(store_kv)(const T *x, int64_t token_stride, int64_t head_stride, const int64_t *slots,
                    void *cache, int64_t tokens, int64_t heads, int64_t n, int64_t block_size,
                    int64_t is_int8) {
#pragma omp parallel for if (tokens * heads * n >= PARALLEL_FROM)
    for (int64_t token = 0; token < tokens; token++) {
        int64_t block = slots[token] / block_size, offset = slots[token] % block_size;
        for (int64_t h = 0; h < heads; h++) {
            int64_t slot = (block * heads + h) * block_size + offset;
            NAME(store_row)(cache, slot, x + token * token_stride + h * head_stride, n, is_int8);
        }
    }
}

// g / (1 + e^-y). For what is rounded to two bytes next, without a division where there are 16 lanes: to 3e-6.
INLINE vf NAME(times_sigmoid)(vf g, vf y) {
#if W == 16
    if (sizeof(T) == 2) {
        const vf top = (vf)_mm512_min_ps((__m512)splat(126), (__m512)(y * -LOG2E));  // NaN stays
        const vf whole = 1.f + exp2_finite(top), part = (vf)_mm512_rcp14_ps((__m512)whole);
        return g * (part * (2.f - whole * part));
    }
#endif
    return g / (1.f + exp_(-y));
}

// out[i] = gate * sigmoid(gate) * up, where a row of x is [gate, up].
void NAME(silu_and_mul)(const T *x, T *out, int64_t rows, int64_t n) {
#pragma omp parallel for if (rows * n >= PARALLEL_FROM / 2)
    for (int64_t row = 0; row < rows; row++) {
        const T *gate = x + row * 2 * n, *up = gate + n;
        for (int64_t i = 0; i < n; i += W) {
            vf g = LOAD(gate + i);
            STORE(out + row * n + i, NAME(times_sigmoid)(g, g) * LOAD(up + i));
        }
    }
}

// The same with gelu in its tanh form: 0.5 * (1 + tanh(y)) = sigmoid(2 * y).
void NAME(gelu_tanh_and_mul)(const T *x, T *out, int64_t rows, int64_t n) {
#pragma omp parallel for if (rows * n >= PARALLEL_FROM / 2)
    for (int64_t row = 0; row < rows; row++) {
        const T *gate = x + row * 2 * n, *up = gate + n;
        for (int64_t i = 0; i < n; i += W) {
            vf g = LOAD(gate + i);
            vf y = 1.5957691216f * (g + 0.044715f * g * g * g);
            STORE(out + row * n + i, NAME(times_sigmoid)(g, y) * LOAD(up + i));
        }
    }
}

// gate * sigmoid(alpha * gate) * (up + 1), with gates of at most `limit`, and ups between both limits.
void NAME(clamped_swiglu)(const T *x, T *out, int64_t rows, int64_t n, float alpha, float limit) {
#pragma omp parallel for if (rows * n >= PARALLEL_FROM / 2)
    for (int64_t row = 0; row < rows; row++) {
        const T *gate = x + row * 2 * n, *up = gate + n;
        for (int64_t i = 0; i < n; i += W) {
            vf g = LOAD(gate + i), u = LOAD(up + i);  // NaN is not larger, and stays
            g = pick(g > limit, splat(limit), g);
            u = pick(u > limit, splat(limit), pick(u < -limit, splat(-limit), u));
            STORE(out + row * n + i, NAME(times_sigmoid)(g, alpha * g) * (u + 1.f));
        }
    }
}
