// Attention's numbers of 8 bits in lanes of 32: how they are packed, and their exact products. A lane
// holds four bytes where an instruction multiplies unsigned ones with signed ones (VNNI), else two
// numbers of 16 bits. Both give the same integers. Knows no element types and no cache.
#pragma once
#include "codes.h"
#include "plan.h"

#if (W == 16 && defined(__AVX512VNNI__)) || (W == 8 && defined(__AVXVNNI__))
#define HAS_BYTE_DOTS
#define PER_LANE 4
#define KEY_ZERO 128  // is added to the codes of keys, as one side has to be unsigned
#else
#define PER_LANE 2
#define KEY_ZERO 0
#endif
#define LEAST 1e-30f  // largest number that is rounded to 8 bits: the inverse of less could be infinite
#define LEAST_UNIT 1e-20f  // of scores: NOTHING_SEEN times it is still far below what exp2 calls 0
#define TOGETHER 32   // keys, beginning with a multiple of it, whose weights share a scale

// To the lanes of `sums`: products of the numbers in `u`, not negative, with those in `s`.
INLINE vf add_dots(vf sums, vf u, vf s) {
#if !defined(HAS_BYTE_DOTS)
    return (vf)dot_pairs((vi)sums, (vi)u, (vi)s);
#elif W == 16
    return (vf)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)u, (__m512i)s);
#else
    return (vf)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)u, (__m256i)s);
#endif
}

#define PRODUCT_ALONE
#define LANES(name) name##_with_keys
#define MULTIPLY_ADD(sum, query, key) add_dots(sum, key, query)
#include "product.h"
#undef LANES
#undef MULTIPLY_ADD
#define LANES(name) name##_with_values
#define MULTIPLY_ADD(sum, weight, value) add_dots(sum, weight, value)
#include "product.h"
#undef LANES
#undef MULTIPLY_ADD
#undef PRODUCT_ALONE

// Lanes of a query or a key of n numbers, and columns of packed values of n: whole vectors, with zeros.
INLINE int64_t lanes_of_key(int64_t n) { return (n / PER_LANE + W - 1) / W * W; }
INLINE int64_t columns_of_value(int64_t n) {
#ifdef HAS_BYTE_DOTS
    return (n + 4 * W - 1) / (4 * W) * (4 * W);
#else
    return n;
#endif
}

#ifdef HAS_BYTE_DOTS
// The bytes of a vector, of which there are n, a multiple of 16; 0 behind them.
INLINE vi load_some(const uint8_t *p, int64_t n) {
#if W == 16
    const __mmask64 is_own = n >= 64 ? ~0ull : (1ull << n) - 1;
    return (vi)_mm512_maskz_loadu_epi8(is_own, p);
#else
    if (n >= 32) return (vi)_mm256_loadu_si256((const void *)p);
    return (vi)_mm256_zextsi128_si256(_mm_loadu_si128((const void *)p));
#endif
}

// Two vectors byte by byte, or pair by pair; of each 16 bytes the first half, or the second.
#if W == 16
#define BITS(name) _mm512_##name
typedef __m512i bits_of_lanes;
#else
#define BITS(name) _mm256_##name
typedef __m256i bits_of_lanes;
#endif
#define UNPACK(name, a, b) (vi) BITS(unpack##name)((bits_of_lanes)(a), (bits_of_lanes)(b))
#endif

// Up to W lanes of a key of which n codes are left.
INLINE vf load_key_lanes(const uint8_t *p, int64_t n) {
#ifdef HAS_BYTE_DOTS
    return (vf)(load_some(p, n) ^ (vi)((vu){0} + 0x80808080));
#elif W == 16
    const __m256i whole = n >= 32 ? _mm256_loadu_si256((const void *)p)
                                  : _mm256_zextsi128_si256(_mm_loadu_si128((const void *)p));
    return (vf)_mm512_cvtepi8_epi16(whole);
#else
    typedef int8_t codes __attribute__((vector_size(2 * W)));
    typedef int16_t pairs __attribute__((vector_size(4 * W)));
    codes own;
    (void)n;
    memcpy(&own, p, sizeof own);
    return (vf)__builtin_convertvector(own, pairs);
#endif
}

INLINE void fetch_codes(const uint8_t *row, int64_t n) {
    for (int64_t i = 0; i < n; i += LINE) __builtin_prefetch(row + i);
}

// `count` rows of codes to lanes [lanes_of_key(n)][TILE]. `next` are the rows of the tile after this one.
static void pack_key_codes(const uint8_t *const *keys, const uint8_t *const *next, int64_t count,
                           int64_t n, float *packed) {
    for (int64_t key = 0; key < count; key += W) {
        for (int i = 0; i < W; i++) fetch_codes(next[key + i], n);
        for (int64_t d = 0; d < n; d += W * PER_LANE) {
            vf lanes[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) lanes[i] = load_key_lanes(keys[key + i] + d, n - d);
            transpose(lanes);
#pragma GCC unroll 16
            for (int i = 0; i < W; i++)
                store_f32(packed + (d / PER_LANE + i) * TILE + key, lanes[i]);
        }
    }
}

// `count` rows to lanes [count / PER_LANE][columns_of_value(n)], in an order that `order_columns` undoes.
static void pack_value_codes(const uint8_t *const *values, const uint8_t *const *next,
                             int64_t count, int64_t n, float *packed) {
    for (int64_t key = 0; key < count; key += PER_LANE) {
        for (int i = 0; i < PER_LANE; i++) fetch_codes(next[key + i], n);
#ifdef HAS_BYTE_DOTS
        for (int64_t d = 0; d < n; d += 4 * W, packed += 4 * W) {
            vi rows[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) rows[i] = load_some(values[key + i] + d, n - d);
            const vi a = UNPACK(lo_epi8, rows[0], rows[1]), b = UNPACK(lo_epi8, rows[2], rows[3]);
            const vi c = UNPACK(hi_epi8, rows[0], rows[1]), e = UNPACK(hi_epi8, rows[2], rows[3]);
            store_f32(packed, (vf)UNPACK(lo_epi16, a, b));
            store_f32(packed + W, (vf)UNPACK(hi_epi16, a, b));
            store_f32(packed + 2 * W, (vf)UNPACK(lo_epi16, c, e));
            store_f32(packed + 3 * W, (vf)UNPACK(hi_epi16, c, e));
        }
#else
        for (int64_t d = 0; d < n; d += W, packed += W) {
            const vi low = widen_signed_bytes(values[key] + d);
            const vi high = widen_signed_bytes(values[key + 1] + d);
            store_f32(packed, (vf)((low & 0xffff) | high << 16));
        }
#endif
    }
}

// Columns as `pack_value_codes` lays them, [columns_of_value(n)], to their own order.
INLINE void order_columns(const float *columns, int64_t n, float *ordered) {
#ifdef HAS_BYTE_DOTS
    for (int64_t d = 0; d < n; d += 4 * W)
        for (int quarter = 0; quarter < W / 4; quarter++)
            for (int i = 0; i < 4; i++)
                memcpy(ordered + d + 16 * quarter + 4 * i, columns + d + W * i + 4 * quarter, 16);
#else
    memcpy(ordered, columns, n * sizeof(float));
#endif
}

// What `scale * number` was rounded to, in lanes; `sum` of the numbers.
typedef struct {
    float scale;  // NaN where one is not finite
    int32_t sum;
} rounded_query;

// W numbers from `at` on of a row of lanes: whole ones, which fit their 8 bits.
INLINE void store_whole(float *lanes, int64_t at, vf v) {
#if !defined(HAS_BYTE_DOTS)
    const vh whole = narrow((vu)nearest(v));
    memcpy((uint16_t *)lanes + at, &whole, sizeof whole);
#elif W == 16
    store_codes((uint8_t *)lanes + at, v);
#else
    const __m256i order = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                           0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m256i bytes = _mm256_shuffle_epi8((__m256i)nearest(v), order);
    const __m128i both = _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes),
                                            _mm256_extracti128_si256(bytes, 1));
    _mm_storel_epi64((void *)((uint8_t *)lanes + at), both);
#endif
}

// n floats at `numbers` to lanes [lanes_of_key(n)]: to nearest, the largest is 127 or -127.
INLINE rounded_query round_query(const float *numbers, int64_t n, float *lanes) {
    vf top = splat(0), strange = splat(0);
    for (int64_t d = 0; d < n; d += W) {
        const vf v = load_f32(numbers + d);
        top = maximum((vf)((vi)v & 0x7fffffff), top);
        strange += v - v;  // 0, or NaN
    }
    const float most = highest(top) > LEAST ? highest(top) : LEAST, inverse = 127 / most;
    vf total = splat(0);
    memset(lanes, 0, lanes_of_key(n) * sizeof(float));
    for (int64_t d = 0; d < n; d += W) {
        const vf v = load_f32(numbers + d);
        const vf whole = to_floats(nearest((vf)((v - v == 0.f) & (vi)v) * inverse));
        store_whole(lanes, d, whole);
        total += whole;
    }
    return (rounded_query){most / 127 + sum(strange), (int32_t)sum(total)};
}

// Columns [0, nv * W) of sums of `mr` queries with keys, both in `lanes`. Constant mr, nv.
INLINE void score_columns(int mr, int nv, const float *queries, int64_t lanes, const float *keys,
                          float *sums) {
    vf own[MAX_ROWS][MAX_VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < mr; r++)
#pragma GCC unroll 8
        for (int j = 0; j < nv; j++) own[r][j] = splat(0);
    product_with_keys(mr, nv, queries, lanes, keys, TILE, lanes, own);
#pragma GCC unroll 8
    for (int r = 0; r < mr; r++)
#pragma GCC unroll 8
        for (int j = 0; j < nv; j++) store_f32(sums + r * TILE + j * W, own[r][j]);
}

INLINE void score_rows_of_codes(int mr, const float *queries, int64_t lanes, const float *keys,
                                int64_t count, float *sums) {
    int64_t c = 0;
    for (; c + MAX_VECTORS * W <= count; c += MAX_VECTORS * W)
        score_columns(mr, MAX_VECTORS, queries, lanes, keys + c, sums + c);
    for (; c + 2 * W <= count; c += 2 * W) score_columns(mr, 2, queries, lanes, keys + c, sums + c);
}

// Columns [0, nv * W) of out [mr][columns] += shares[r][i] * (weights @ values), of TOGETHER keys each.
INLINE void add_columns(int mr, int nv, const float *weights, const float *values, int64_t columns,
                        int64_t count, float shares[MAX_ROWS][TILE / TOGETHER], float *out) {
    for (int64_t i = 0; i < count / TOGETHER; i++) {
        vf own[MAX_ROWS][MAX_VECTORS];
#pragma GCC unroll 8
        for (int r = 0; r < mr; r++)
#pragma GCC unroll 8
            for (int j = 0; j < nv; j++) own[r][j] = splat(0);
        product_with_values(mr, nv, weights + i * (TOGETHER / PER_LANE), TILE / PER_LANE,
                            values + i * (TOGETHER / PER_LANE) * columns, columns,
                            TOGETHER / PER_LANE, own);
#pragma GCC unroll 8
        for (int r = 0; r < mr; r++)
#pragma GCC unroll 8
            for (int j = 0; j < nv; j++) {
                float *const to = out + r * columns + j * W;
                store_f32(to, multiply_add(to_floats((vi)own[r][j]), splat(shares[r][i]),
                                           load_f32(to)));
            }
    }
}

INLINE void add_rows_of_codes(int mr, const float *weights, const float *values, int64_t columns,
                              int64_t count, float shares[MAX_ROWS][TILE / TOGETHER], float *out) {
    int64_t c = 0;
    for (; c + MAX_VECTORS * W <= columns; c += MAX_VECTORS * W)
        add_columns(mr, MAX_VECTORS, weights, values + c, columns, count, shares, out + c);
    for (; c < columns; c += W)
        add_columns(mr, 1, weights, values + c, columns, count, shares, out + c);
}

#define CASES_OF_ROWS CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)

// Sums of 1 <= mr <= MAX_ROWS queries [mr][lanes] with `count` packed keys, a multiple of TOGETHER, as
// whole numbers [mr][TILE].
static __attribute__((noinline)) void score_codes(int mr, const float *queries, int64_t lanes,
                                                  const float *keys, int64_t count, float *sums) {
#define CASE(rows) \
    case rows: score_rows_of_codes(rows, queries, lanes, keys, count, sums); break;
    switch (mr) { CASES_OF_ROWS }
#undef CASE
}

// What `add_columns` adds, to all columns; weights [mr][TILE / PER_LANE].
static __attribute__((noinline)) void weigh_codes(int mr, const float *weights, const float *values,
                                                  int64_t columns, int64_t count,
                                                  float shares[MAX_ROWS][TILE / TOGETHER],
                                                  float *out) {
#define CASE(rows) \
    case rows: add_rows_of_codes(rows, weights, values, columns, count, shares, out); break;
    switch (mr) { CASES_OF_ROWS }
#undef CASE
}

// The largest of each of four vectors.
INLINE void maxima_of_four(const vf v[4], float *maxima) {
    const vi quarter = INDEXES & ~3, place = INDEXES & 3;
    const vi low = quarter + (place >> 1) + (place & 1) * W;  // of two vectors, number by number
    const vi low_pairs = quarter + (place & 1) + (place >> 1) * W;
    vf a = maximum(__builtin_shuffle(v[0], v[1], low), __builtin_shuffle(v[0], v[1], low + 2));
    vf b = maximum(__builtin_shuffle(v[2], v[3], low), __builtin_shuffle(v[2], v[3], low + 2));
    vf all = maximum(__builtin_shuffle(a, b, low_pairs), __builtin_shuffle(a, b, low_pairs + 2));
#pragma GCC unroll 2
    for (int half = W / 2; half >= 4; half /= 2)
        all = maximum(all, __builtin_shuffle(all, INDEXES ^ half));
    memcpy(maxima, &all, 4 * sizeof(float));
}

// One row of sums to weights relative to the highest score so far; returns what scales earlier ones.
// Keys [begin, end) of columns [first, last), multiples of TOGETHER, are visible. `scales`: [2][TILE],
// of keys and of values. Weights times scales of values become whole numbers up to 255 in lanes, of
// which each TOGETHER have one of the `shares` as their scale.
static float soften_codes(const attention *args, const float *scales, rounded_query query,
                          float *scores, float *weights, int64_t first, int64_t last,
                          int64_t begin, int64_t end, float shares[TILE / TOGETHER], float *max,
                          float *totals) {
    const int is_partly_seen = begin > first || end < last;
    if (begin >= end) {  // by another row of these
        memset(shares, 0, TILE / TOGETHER * sizeof(float));
        return 1;
    }
    float unit = args->scaling * query.scale;
    unit = unit < LEAST_UNIT ? LEAST_UNIT : unit;  // else what is not seen would count; NaN stays NaN
    const int32_t zero = KEY_ZERO * query.sum;
    const float softcap = args->softcap, per_cap = softcap > 0 ? 2 * unit / softcap : 0;
    vf top = splat(-INFINITY), sums = {0};
    for (int64_t c = first; c < last; c += W) {
        vf score = to_floats((vi)load_f32(scores + c) - zero) * load_f32(scales + c);
        if (softcap > 0) score = softcap * (1.f - 2.f / (exp_(score * per_cap) + 1.f));
        if (is_partly_seen) {
            const vi column = INDEXES + (int32_t)c;
            const vi is_seen = (column >= (int32_t)begin) & (column < (int32_t)end);
            score = pick(is_seen, score, splat(NOTHING_SEEN));
        }
        store_f32(scores + c, score);
        top = maximum(score, top);
    }
    if (softcap > 0 && unit == unit) unit = 1;
    unit *= LOG2E;
    float scale = 1, new_max = highest(top) * unit;
    if (new_max > *max) scale = exp2_rough(splat(*max - new_max))[0], *max = new_max;
    const vf minus_max = splat(-*max);
    vf tops[TILE / TOGETHER] = {{0}};
    for (int64_t c = first, i = 0; c < last; c += TOGETHER, i++)
#pragma GCC unroll 8
        for (int64_t k = c; k < c + TOGETHER; k += W) {
            vf p = exp2_finite(multiply_add(load_f32(scores + k), splat(unit), minus_max));
            sums += p;
            p *= load_f32(scales + TILE + k);
            store_f32(scores + k, p);
            tops[i] = maximum(p, tops[i]);
        }
    store_f32(totals, load_f32(totals) * scale + sums);
    float most[TILE / TOGETHER], inverse[TILE / TOGETHER];
    maxima_of_four(tops, most);
#pragma GCC unroll 4
    for (int i = 0; i < TILE / TOGETHER; i++) {
        most[i] = most[i] > LEAST ? most[i] : LEAST;
        inverse[i] = 255 / most[i];
        shares[i] = most[i] * (1.f / 255);
    }
    for (int64_t c = first, i = 0; c < last; c += TOGETHER, i++)
#pragma GCC unroll 8
        for (int64_t k = c; k < c + TOGETHER; k += W)
            store_whole(weights, k, load_f32(scores + k) * inverse[i]);
    return scale;
}
