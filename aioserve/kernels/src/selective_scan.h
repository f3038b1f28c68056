// Mamba 1 over the tokens of some texts, each behind its state (Gu and Dao, "Mamba: Linear-Time
// Sequence Modeling with Selective State Spaces", 2023). Numbers are float32.
#pragma once
#include "any_element.h"

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
