// Causal convolutions of single channels, and of tokens behind a state that keeps the last inputs.
// Sums are float32, rounded once, behind the activation.
#pragma once
#include "any_element.h"

INLINE void conv_tokens(const void *x, int64_t x_row, int64_t x_token, int64_t type,
                        const float *weight, const float *bias, int64_t is_silu, void *out,
                        int64_t rows, int64_t tokens, int64_t channels, int64_t taps) {
#pragma omp parallel for if (rows * tokens * channels >= STATES_PARALLEL_FROM)
    for (int64_t i = 0; i < rows * tokens; i++) {
        int64_t row = i / tokens, t = i % tokens, first = t < taps - 1 ? taps - 1 - t : 0;
        const void *in = any_at(x, row * x_row + (t - (taps - 1)) * x_token, type);
        for (int64_t c = 0; c < channels; c += W) {
            vf total = bias ? load_f32(bias + c) : splat(0);
            for (int64_t j = first; j < taps; j++)
                total = multiply_add(load_any(in, j * x_token + c, type),
                                     load_f32(weight + j * channels + c), total);
            store_any(out, i * channels + c, type, is_silu ? silu_(total) : total);
        }
    }
}

// x [rows, tokens, channels], rows and tokens the given numbers apart; out as x, in one piece; before
// the first token are zeros. weight [taps, channels]: the last is the token's own. bias [channels] or
// 0. channels is a multiple of 16.
void causal_conv(const void *x, int64_t x_row, int64_t x_token, int64_t type, const float *weight,
                 const float *bias, int64_t is_silu, void *out, int64_t rows, int64_t tokens,
                 int64_t channels, int64_t taps) {
#define TOKENS(type)                                                                           \
    conv_tokens(x, x_row, x_token, type, weight, bias, is_silu, out, rows, tokens, channels, taps)
    if (type == ANY_F32) TOKENS(ANY_F32);
    else if (type == ANY_BF16) TOKENS(ANY_BF16);
    else TOKENS(ANY_F16);
#undef TOKENS
}

#define CONV_MOST 16  // inputs that a state keeps, and taps

// The inputs of W channels, [width], one behind the other, become [width][W], and `next` is put
// behind them: the oldest goes.
#define SHIFT_INPUTS(name, E)                                                                    \
    INLINE void name(E *s, const E *next, E (*inputs)[W], int64_t width) {                       \
        for (int64_t c = 0; c < W; c++)                                                          \
            for (int64_t j = 0; j < width; j++) inputs[j][c] = s[c * width + j];                 \
        memcpy(inputs[width], next, sizeof inputs[width]);                                       \
        for (int64_t c = 0; c < W; c++)                                                          \
            for (int64_t j = 0; j < width; j++) s[c * width + j] = inputs[j + 1][c];             \
    }
SHIFT_INPUTS(shift_halves, uint16_t)
SHIFT_INPUTS(shift_floats, float)

// The same of four inputs of two bytes, as most models have them: those of a channel are one number.
INLINE void shift_four_halves(uint16_t *s, const uint16_t *next, uint16_t (*inputs)[W]) {
    uint64_t kept[W];
    memcpy(kept, s, sizeof kept);
    for (int64_t c = 0; c < W; c++) {
        for (int64_t j = 0; j < 4; j++) inputs[j][c] = kept[c] >> 16 * j;
        kept[c] = kept[c] >> 16 | (uint64_t)next[c] << 48;
    }
    memcpy(s, kept, sizeof kept);
    memcpy(inputs[4], next, sizeof inputs[4]);
}

// The `taps` of W channels, [taps], as floats [taps][W].
INLINE void conv_weights(const void *weight, int64_t first, int64_t type, float (*out)[W],
                         int64_t taps) {
    float numbers[CONV_MOST * W] __attribute__((aligned(LINE)));
    widen_any(weight, first * taps, type, numbers, W * taps);
    for (int64_t c = 0; c < W; c++)
        for (int64_t j = 0; j < taps; j++) out[j][c] = numbers[c * taps + j];
}

INLINE void conv_channels(void *states, int64_t stride, const void *x, int64_t x_row, int64_t type,
                          const void *weight, const void *bias, int64_t is_silu, void *out,
                          int64_t rows, int64_t channels, int64_t taps, int64_t width) {
#pragma omp parallel for if (rows * channels * width >= STATES_PARALLEL_FROM)
    for (int64_t c = 0; c < channels; c += W) {
        float by[CONV_MOST][W] __attribute__((aligned(LINE)));
        float inputs[CONV_MOST + 1][W] __attribute__((aligned(LINE)));
        conv_weights(weight, c, type, by, taps);
        for (int64_t row = 0; row < rows; row++) {
            void *s = (void *)any_at(states, row * stride + c * width, type);
            const void *next = any_at(x, row * x_row + c, type);
            if (type == ANY_F32) shift_floats(s, next, inputs, width);
            else if (width == 4) shift_four_halves(s, next, (uint16_t(*)[W])inputs);
            else shift_halves(s, next, (uint16_t(*)[W])inputs, width);
            vf total = bias ? load_any(bias, c, type) : splat(0);
            for (int64_t j = 0; j < taps; j++)
                total = multiply_add(load_any(inputs, (width + 1 - taps + j) * W, type),
                                     load_f32(by[j]), total);
            store_any(out, row * channels + c, type, is_silu ? silu_(total) : total);
        }
    }
}

// One token: x [rows, channels], out as x, in one piece. The state of row r begins at states + r *
// stride: [channels, width], the last inputs, which change; width + 1 >= taps, and neither is above
// 16. weight [channels, taps], bias [channels] or 0; all of one type. channels is a multiple of 16.
void causal_conv_step(void *states, int64_t stride, const void *x, int64_t x_row, int64_t type,
                      const void *weight, const void *bias, int64_t is_silu, void *out,
                      int64_t rows, int64_t channels, int64_t taps, int64_t width) {
#define CHANNELS_OF(type, taps, width)                                                          \
    conv_channels(states, stride, x, x_row, type, weight, bias, is_silu, out, rows, channels,   \
                  taps, width)
    if (type == ANY_BF16 && taps == 4 && width == 4) CHANNELS_OF(ANY_BF16, 4, 4);
    else if (type == ANY_BF16) CHANNELS_OF(ANY_BF16, taps, width);
    else if (type == ANY_F32) CHANNELS_OF(ANY_F32, taps, width);
    else CHANNELS_OF(ANY_F16, taps, width);
#undef CHANNELS_OF
}
