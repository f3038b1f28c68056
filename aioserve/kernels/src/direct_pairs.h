// Products of few queries with keys and values as they lie, by AVX512's dot products of bfloat16
// pairs. A decode row meets each number of the cache once: packing it would take longer.
//
// Addresses of rows come in arrays, one row per key. Those of `next` are fetched meanwhile: the
// processor cannot guess where the next block lies.
#pragma once
#include "plan.h"

INLINE vf dot(vf sums, vf a, vf b) {
    return (vf)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
}

// Four vectors of four quarters, in place: quarter i of vector j to quarter j of vector i.
INLINE void transpose_quarters(vf v[4]) {
    __m512 low[2], high[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        low[i] = _mm512_shuffle_f32x4((__m512)v[2 * i], (__m512)v[2 * i + 1], 0x44);
        high[i] = _mm512_shuffle_f32x4((__m512)v[2 * i], (__m512)v[2 * i + 1], 0xee);
    }
    v[0] = (vf)_mm512_shuffle_f32x4(low[0], low[1], 0x88);
    v[1] = (vf)_mm512_shuffle_f32x4(low[0], low[1], 0xdd);
    v[2] = (vf)_mm512_shuffle_f32x4(high[0], high[1], 0x88);
    v[3] = (vf)_mm512_shuffle_f32x4(high[0], high[1], 0xdd);
}

// Lane i of each quarter: the sum of that quarter of vector i.
INLINE vf sums_of_quarters(const vf v[4]) {
    vf two[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        __m512 a = (__m512)v[2 * i], b = (__m512)v[2 * i + 1];
        two[i] = (vf)_mm512_unpacklo_ps(a, b) + (vf)_mm512_unpackhi_ps(a, b);
    }
    __m512d a = (__m512d)two[0], b = (__m512d)two[1];
    return (vf)_mm512_unpacklo_pd(a, b) + (vf)_mm512_unpackhi_pd(a, b);
}

// Scores of `mr` queries, a constant, with 16 keys of `lanes` pairs.
INLINE void score_block(int mr, const float *queries, const bf16 *const *keys,
                        const bf16 *const *next, int64_t lanes, float *scores) {
    vf sums[DIRECT_ROWS][4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {  // keys i, i + 4, i + 8, i + 12, side by side
#pragma GCC unroll 8
        for (int r = 0; r < mr; r++) sums[r][i] = splat(0);
        for (int64_t d = 0; d < lanes; d += W) {
            vf block[4];
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                block[j] = load_f32((const float *)keys[4 * j + i] + d);
                __builtin_prefetch((const float *)next[4 * i + j] + d);
            }
            transpose_quarters(block);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++)
#pragma GCC unroll 8
                for (int r = 0; r < mr; r++) {
                    __m128 part = _mm_loadu_ps(queries + r * lanes + d + 4 * j);
                    sums[r][i] = dot(sums[r][i], (vf)_mm512_broadcast_f32x4(part), block[j]);
                }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < mr; r++) store_f32(scores + r * TILE, sums_of_quarters(sums[r]));
}

// `count` keys, a multiple of 16, to scores [mr][TILE].
INLINE void score_rows(int mr, const float *queries, const bf16 *const *keys,
                       const bf16 *const *next, int64_t count, int64_t lanes, float *scores) {
    for (int64_t key = 0; key < count; key += W)
        score_block(mr, queries, keys + key, next + key, lanes, scores + key);
}

// Columns [column, column + 32 * vectors) of out = scale * out + weights @ values: constant
// `vectors` <= 2, weights bfloat16 [mr][TILE], out float32 [mr][value_dim].
INLINE void weigh_columns(int mr, int vectors, const float *weights, const bf16 *const *values,
                          const bf16 *const *next, int64_t count, const float *scales, float *out,
                          int64_t value_dim, int64_t column) {
    const __m512i low = (__m512i)(INDEXES | (INDEXES + 32) << 16);  // of two rows: number by number
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(W));
    vf sums[DIRECT_ROWS][4];
#pragma GCC unroll 8
    for (int r = 0; r < mr; r++)
#pragma GCC unroll 4
        for (int j = 0; j < 2 * vectors; j++)
            sums[r][j] = load_f32(out + r * value_dim + column + j * W) * scales[r];
    for (int64_t pair = 0; pair < count / 2; pair++) {
        vf pairs[4];
#pragma GCC unroll 2
        for (int j = 0; j < vectors; j++) {
            int64_t place = column + 32 * j;
            __m512i a = _mm512_loadu_si512(values[2 * pair] + place);
            __m512i b = _mm512_loadu_si512(values[2 * pair + 1] + place);
            pairs[2 * j] = (vf)_mm512_permutex2var_epi16(a, low, b);
            pairs[2 * j + 1] = (vf)_mm512_permutex2var_epi16(a, high, b);
            __builtin_prefetch(next[2 * pair] + place);
            __builtin_prefetch(next[2 * pair + 1] + place);
        }
#pragma GCC unroll 8
        for (int r = 0; r < mr; r++) {
            vf weight = splat_bits(weights + r * (TILE / 2) + pair);
#pragma GCC unroll 4
            for (int j = 0; j < 2 * vectors; j++) sums[r][j] = dot(sums[r][j], weight, pairs[j]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < mr; r++)
#pragma GCC unroll 4
        for (int j = 0; j < 2 * vectors; j++)
            store_f32(out + r * value_dim + column + j * W, sums[r][j]);
}

// All columns; as many at a time as there are registers for their sums.
INLINE void weigh_rows(int mr, const float *weights, const bf16 *const *values,
                       const bf16 *const *next, int64_t count, const float *scales, float *out,
                       int64_t value_dim) {
    int64_t column = 0;
    if (mr <= 4)
        for (; column + 64 <= value_dim; column += 64)
            weigh_columns(mr, 2, weights, values, next, count, scales, out, value_dim, column);
    for (; column < value_dim; column += 32)
        weigh_columns(mr, 1, weights, values, next, count, scales, out, value_dim, column);
}

#define CASE(rows) case rows: CALL(rows); break;
#define COMPILED_CALLS(rows) \
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }

static __attribute__((noinline)) void NAME(score_keys)(int mr, const float *queries,
                                                       const bf16 *const *keys,
                                                       const bf16 *const *next, int64_t count,
                                                       int64_t lanes, float *scores) {
#define CALL(rows) score_rows(rows, queries, keys, next, count, lanes, scores)
    COMPILED_CALLS(mr)
#undef CALL
}

static __attribute__((noinline)) void NAME(weigh_values)(int mr, const float *weights,
                                                         const bf16 *const *values,
                                                         const bf16 *const *next, int64_t count,
                                                         const float *scales, float *out,
                                                         int64_t value_dim) {
#define CALL(rows) weigh_rows(rows, weights, values, next, count, scales, out, value_dim)
    COMPILED_CALLS(mr)
#undef CALL
}
#undef CASE
#undef COMPILED_CALLS
