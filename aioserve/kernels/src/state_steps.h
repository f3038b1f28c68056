// Steps of layers that keep a state between tokens: the gated delta rule, Mamba 2, Mamba 1.
// Numbers are float32, sizes of a state multiples of 16. Each row and head is one thread's, in one
// order: a row's result depends neither on other rows nor on threads.
#pragma once
#include "vector.h"

// Fewer numbers of states than this are done before the other threads have started.
#define STATES_PARALLEL_FROM 65536

// `n` vectors of the columns of a head's state S [size, width]: S *= decay, then S += k d' with
// d = beta (v - S' k), and out = S' q. S is read from memory once, and written once.
INLINE void delta_columns(float *s, const float *q, const float *k, const float *v, float decay,
                          float beta, float *out, int64_t size, int64_t width, int n) {
    vf known[4], change[4], result[4];
    for (int j = 0; j < n; j++) known[j] = result[j] = splat(0);
    for (int64_t i = 0; i < size; i++)
        for (int j = 0; j < n; j++)
            known[j] = multiply_add(load_f32(s + i * width + j * W), splat(k[i]), known[j]);
    for (int j = 0; j < n; j++)
        change[j] = (load_f32(v + j * W) - splat(decay) * known[j]) * splat(beta);
    for (int64_t i = 0; i < size; i++)
        for (int j = 0; j < n; j++) {
            float *at = s + i * width + j * W;
            vf now = multiply_add(splat(k[i]), change[j], splat(decay) * load_f32(at));
            store_f32(at, now);
            result[j] = multiply_add(now, splat(q[i]), result[j]);
        }
    for (int j = 0; j < n; j++) store_f32(out + j * W, result[j]);
}

// The states of row r begin at states + r * stride: [value_heads, key_dim, value_dim].
// q and k [rows, key_heads, key_dim], v and out [rows, value_heads, value_dim], decay and beta
// [rows, value_heads]. Neighbouring value heads have a key head in common.
void gated_delta_step(float *states, int64_t stride, const float *q,
                      const float *k, const float *v, const float *decay, const float *beta,
                      float *out, int64_t rows, int64_t key_heads, int64_t value_heads,
                      int64_t key_dim, int64_t value_dim) {
    int64_t per_head = key_dim * value_dim;
#pragma omp parallel for if (rows * value_heads * per_head >= STATES_PARALLEL_FROM)
    for (int64_t i = 0; i < rows * value_heads; i++) {
        int64_t row = i / value_heads, head = i % value_heads;
        int64_t key = (row * key_heads + head / (value_heads / key_heads)) * key_dim;
        float *s = states + row * stride + head * per_head;
        const float *values = v + i * value_dim;
        int64_t c = 0;
        for (; c + 4 * W <= value_dim; c += 4 * W)
            delta_columns(s + c, q + key, k + key, values + c, decay[i], beta[i],
                          out + i * value_dim + c, key_dim, value_dim, 4);
        for (; c < value_dim; c += W)
            delta_columns(s + c, q + key, k + key, values + c, decay[i], beta[i],
                          out + i * value_dim + c, key_dim, value_dim, 1);
    }
}

// Mamba 2. The states of row r begin at states + r * stride: [heads, head_dim, size]. Of a
// head S = decay S + x (dt b)', out = S c + d x, with x and out [rows, heads, head_dim], decay and
// dt [rows, heads], b and c [rows, groups, size], d [heads].
void state_space_step(float *states, int64_t stride, const float *x,
                      const float *decay, const float *dt, const float *b, const float *c,
                      const float *d, float *out, int64_t rows, int64_t heads, int64_t head_dim,
                      int64_t groups, int64_t size) {
#pragma omp parallel for if (rows * heads * head_dim * size >= STATES_PARALLEL_FROM)
    for (int64_t i = 0; i < rows * heads; i++) {
        int64_t row = i / heads, head = i % heads;
        int64_t group = (row * groups + head / (heads / groups)) * size;
        float *s = states + row * stride + head * head_dim * size;
        vf kept = splat(decay[i]);
        for (int64_t p = 0; p < head_dim; p++, s += size) {
            float in = x[i * head_dim + p];
            vf added = splat(in * dt[i]), result = splat(0);
            for (int64_t n = 0; n < size; n += W) {
                vf now = multiply_add(added, load_f32(b + group + n), kept * load_f32(s + n));
                store_f32(s + n, now);
                result = multiply_add(now, load_f32(c + group + n), result);
            }
            out[i * head_dim + p] = sum(result) + d[head] * in;
        }
    }
}

#define CHANNELS 16  // of a row that a thread goes through the tokens with: a line of memory

// Mamba 1, all tokens of the rows. States [rows, channels, size]. Of a channel and token
// S = exp(dt a) S + dt x b, out = S c + d x, with x, dt and out [rows, tokens, channels],
// a [channels, size], b and c [rows, tokens, size], d [channels].
void selective_scan(float *states, int64_t stride, const float *x, const float *dt, const float *a,
                    const float *b, const float *c, const float *d, float *out, int64_t rows,
                    int64_t tokens, int64_t channels, int64_t size) {
    int64_t blocks = (channels + CHANNELS - 1) / CHANNELS;
#pragma omp parallel for if (rows * tokens * channels * size >= STATES_PARALLEL_FROM)
    for (int64_t i = 0; i < rows * blocks; i++) {
        int64_t row = i / blocks, first = i % blocks * CHANNELS;
        int64_t end = first + CHANNELS < channels ? first + CHANNELS : channels;
        for (int64_t t = row * tokens; t < (row + 1) * tokens; t++)
            for (int64_t channel = first; channel < end; channel++) {
                float *s = states + row * stride + channel * size;
                float step = dt[t * channels + channel], in = x[t * channels + channel];
                vf result = splat(0);
                for (int64_t n = 0; n < size; n += W) {
                    vf kept = exp_(splat(step) * load_f32(a + channel * size + n));
                    vf added = splat(step * in) * load_f32(b + t * size + n);
                    vf now = multiply_add(kept, load_f32(s + n), added);
                    store_f32(s + n, now);
                    result = multiply_add(now, load_f32(c + t * size + n), result);
                }
                out[t * channels + channel] = sum(result) + d[channel] * in;
            }
    }
}
