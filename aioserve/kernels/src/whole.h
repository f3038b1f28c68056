// Products of rows of whole numbers with quantized weights, straight from their codes. A sum
// over inputs that share scales is exact; those are added in float32, in their order. Knows no
// element types.
#pragma once
#include "blocks.h"

#define SHARED 32  // inputs of a row that share a scale
#define AHEAD_BYTES 2048  // of codes, fetched before they are needed
#if W == 16  // unpacking costs less there than reading twice to four times the bytes again
#define UNPACK_FROM INT64_MAX
#else
#define UNPACK_FROM 31  // rows: fewer unpack in registers
#endif

// Rows in bfloat16 from which on they stay what they are, and from which on weights become bfloat16
// as well, a panel at a time: AMX makes up for that. Measured. Intel's CPUs make half as many products
// by pairs of bfloat16 as by those of whole numbers, so where AMX is, few rows go that way.
#ifdef __AMX_BF16__
#define KEPT_FROM 14
#define ROUNDED_FROM 14
#elif defined(__AVX512BF16__)
#define KEPT_FROM 0
#define ROUNDED_FROM INT64_MAX
#else
#define KEPT_FROM INT64_MAX
#define ROUNDED_FROM INT64_MAX
#endif

#define WHOLE_BITS 16  // of a number

// 32 inputs of a row: the sums are those of their values, of all and of both halves.
typedef struct {
    float scale, sum, halves[2];  // the scale is NaN where a number is not finite
} share;

// Rows of x as `scale * value`.
typedef struct {
    int16_t *values;  // [rows][stride]
    share *shares;    // [rows][in / SHARED]
    int64_t in, stride;
} whole_rows;

// Its `values` are null where there is no memory.
static whole_rows allocate_whole(int64_t rows, int64_t in) {
    whole_rows x = {.in = in, .stride = in + 32};
    const int64_t bytes = x.stride * 2 + in / SHARED * sizeof(share);
    x.values = take_lines(rows * bytes);
    if (!x.values) return x;
    x.shares = (share *)(x.values + rows * x.stride);
    return x;
}

// What 32 bits hold of the inputs 2p and 2p + 1, in 16 bits each.
INLINE vi pair_of(int bits, vi codes, int p) {
    if (bits == 16) return codes;
    return codes >> code_place(bits, 2 * p) & ((1 << bits) - 1) * 0x10001;
}

// `numbers` [SHARED] of a row. The scale is a power of two: a number of few bits stays what it is,
// unless it is far smaller than the largest.
INLINE void round_to_whole(const whole_rows *x, int64_t row, int64_t start, const float *numbers) {
    vi top = {0};
    for (int k = 0; k < SHARED; k += W) {
        const vi size = (vi)load_f32(numbers + k) & 0x7fffffff;
        const vi is_more = size > top;
        top = (is_more & size) | (~is_more & top);
    }
    int32_t most = 0;
    for (int i = 0; i < W; i++) most = top[i] > most ? top[i] : most;
    const int32_t exponent = most >> 23 > 40 ? most >> 23 : 40;
    const int32_t bits[2] = {(exponent - WHOLE_BITS + 2) << 23,
                             (254 + WHOLE_BITS - 2 - exponent) << 23};
    share to;
    float inverse;
    memcpy(&to.scale, bits, 4), memcpy(&inverse, bits + 1, 4);
    if (exponent == 255) to.scale = NAN;
    int16_t *values = x->values + row * x->stride + start;
    for (int half = 0; half < 2; half++) {
        vi sums = {0};
        for (int k = 16 * half; k < 16 * half + 16; k += W) {
            const vi v = to_ints(load_f32(numbers + k) * inverse);
            const vh low = narrow((vu)v);
            memcpy(values + k, &low, sizeof low);
            sums += v;
        }
        to.halves[half] = sum(to_floats(sums));
    }
    to.sum = to.halves[0] + to.halves[1];
    x->shares[(row * x->in + start) / SHARED] = to;
}

// sums += what products of `q` with codes of a group are worth, by its scales and offsets.
INLINE vf add_share(vf sums, vi q, vf scale, vf offset, float total, float shared) {
    const vf own = multiply_add(offset, splat(total), to_floats(q) * scale);
    return multiply_add(own, splat(shared), sums);
}

// A panel for many rows: for each group its scales and offsets as floats, then the codes in 16 bits.
INLINE int64_t unpacked_bytes(const block_part *part, int64_t in) {
    return in / part->group * PANEL * (8 + 2 * part->group);
}

INLINE void unpack_codes_as(int bits, const place *at, int64_t in, uint8_t *to) {
    const block_part *part = at->part;
    for (int64_t group = 0; group < in / part->group; group++) {
        float *const scales = (float *)to;
        const uint8_t *codes = read_scales(part, at->panel, group, part->zero, scales,
                                           scales + PANEL);
        to += 8 * PANEL;
        for (int64_t k = 0; k < part->group; k += 32 / bits, codes += 4 * PANEL)
            for (int64_t j = 0; j < PANEL; j += W) {
                const vi both = (vi)load_f32((const float *)codes + j);
#pragma GCC unroll 4
                for (int q = 0; q < 16 / bits; q++)
                    store_f32((float *)to + (k / 2 + q) * PANEL + j, (vf)pair_of(bits, both, q));
            }
        to += 2 * part->group * PANEL;
    }
}

static void unpack_codes(const place *at, int64_t in, uint8_t *to) {
    if (at->part->bits == 4) unpack_codes_as(4, at, in, to);
    else unpack_codes_as(8, at, in, to);
}

// sums [rows][PANEL] of rows [first, first + rows) and a panel, or what `unpack_codes` made of it:
// then of 16 bits. Constant rows and bits.
INLINE void whole_tile(int rows, int bits, const whole_rows *x, int64_t first, const place *at,
                       const uint8_t *unpacked, float *sums) {
    const block_part *part = at->part;
    const int64_t size = smaller(part->group, SHARED), shares = x->in / SHARED;
    const int16_t *const from = x->values + first * x->stride;
    float own_scales[2 * PANEL];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < PANEL; j += W) store_f32(sums + r * PANEL + j, splat(0));
    for (int64_t group = 0; group < x->in / part->group; group++) {
        const float *scales = bits == 16 ? (const float *)unpacked : own_scales;
        const uint8_t *codes = unpacked + 8 * PANEL;
        if (bits == 16) unpacked += PANEL * (8 + 2 * part->group);
        else codes = read_scales(part, at->panel, group, part->zero, own_scales, own_scales + PANEL);
        for (int64_t start = group * part->group; start < (group + 1) * part->group; start += size) {
            vi own[MAX_ROWS][MAX_VECTORS];
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                for (int j = 0; j < MAX_VECTORS; j++) own[r][j] = (vi){0};
            for (int64_t k = start; k < start + size; k += 32 / bits, codes += 4 * PANEL) {
                vi both[MAX_VECTORS];
#pragma GCC unroll 4
                for (int j = 0; j < MAX_VECTORS; j++) {
                    both[j] = (vi)load_f32((const float *)codes + j * W);
                    if (j * W % 16 == 0) __builtin_prefetch(codes + j * 4 * W + AHEAD_BYTES);
                }
#pragma GCC unroll 4
                for (int q = 0; q < 16 / bits; q++)
#pragma GCC unroll 4
                    for (int j = 0; j < MAX_VECTORS; j++) {
                        const vi right = pair_of(bits, both[j], q);
#pragma GCC unroll 8
                        for (int r = 0; r < rows; r++)
                            own[r][j] = dot_pairs(
                                own[r][j], right,
                                (vi)splat_bits((const float *)(from + r * x->stride + k + 2 * q)));
                    }
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const share *of = x->shares + (first + r) * shares + (start >> 5);
                const float total = size == 16 ? of->halves[start >> 4 & 1] : of->sum;
#pragma GCC unroll 4
                for (int j = 0; j < MAX_VECTORS; j++) {
                    float *const to = sums + r * PANEL + j * W;
                    store_f32(to, add_share(load_f32(to), own[r][j], load_f32(scales + j * W),
                                            load_f32(scales + PANEL + j * W), total, of->scale));
                }
            }
        }
    }
}

static __attribute__((noinline)) void multiply_whole(int rows, const whole_rows *x, int64_t first,
                                                     const place *at, const uint8_t *unpacked,
                                                     float *sums) {
#define CASE(rows)                                                             \
    case rows:                                                                 \
        if (unpacked) whole_tile(rows, 16, x, first, at, unpacked, sums);      \
        else if (at->part->bits == 4) whole_tile(rows, 4, x, first, at, 0, sums); \
        else whole_tile(rows, 8, x, first, at, 0, sums);                       \
        break;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
    }
#undef CASE
}

// Which way a product goes: how many rows at once, and whether panels are unpacked for them.
typedef struct {
    whole_rows x;
    int64_t at_once;     // rows
    int64_t room_bytes;  // of a thread, for what a panel becomes
    int is_unpacked;
} product;

static product begin_product(const linear *layer, int64_t rows) {
    product all = {.x = allocate_whole(rows, layer->in), .is_unpacked = rows >= UNPACK_FROM};
    all.at_once = ceil_div(rows, ceil_div(rows, MAX_ROWS));
    for (int64_t i = 0; i < layer->num_parts && all.is_unpacked; i++)
        all.room_bytes = larger(all.room_bytes, unpacked_bytes(layer->parts + i, layer->in));
    return all;
}
