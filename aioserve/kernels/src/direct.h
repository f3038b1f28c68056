// Products of few queries with keys and values as they lie. A decode row meets each number of the
// cache once: packing it would take longer. Included once per element type whose lanes are floats:
// T, LOAD_PART, NAME. Queries and sums lie in the order of LOAD_PART.
//
// Addresses of rows come in arrays, one row per key. Those of `next` are fetched meanwhile: the
// processor cannot guess where the next block lies. With TILES (attention.h), the
// last of every four is fetched between these products (places.h).

#ifndef AT_ONCE
#if MAX_VECTORS == 4  // queries, each with 4 sums and a number of its own in registers
#define AT_ONCE 6
#define CASES CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#else
#define AT_ONCE 3
#define CASES CASE(1) CASE(2) CASE(3)
#endif
#define PART (2 * W)  // numbers that LOAD_PART makes two vectors of

// The sums of four vectors.
INLINE void store_sums_of_four(const vf v[4], float *sums) {
    const vi quarter = INDEXES & ~3, place = INDEXES & 3;
    const vi low = quarter + (place >> 1) + (place & 1) * W;  // of two vectors, number by number
    const vi low_pairs = quarter + (place & 1) + (place >> 1) * W;
    vf a = __builtin_shuffle(v[0], v[1], low) + __builtin_shuffle(v[0], v[1], low + 2);
    vf b = __builtin_shuffle(v[2], v[3], low) + __builtin_shuffle(v[2], v[3], low + 2);
    vf all = __builtin_shuffle(a, b, low_pairs) + __builtin_shuffle(a, b, low_pairs + 2);
#pragma GCC unroll 2
    for (int half = W / 2; half >= 4; half /= 2) all += __builtin_shuffle(all, INDEXES ^ half);
    memcpy(sums, &all, 4 * sizeof(float));
}
#endif

#ifdef TILES
#define FETCHED_OF_FOUR 3
#define FETCH FETCH_TO_SECOND
#else
#define FETCHED_OF_FOUR 4
#define FETCH __builtin_prefetch
#endif

// Scores of `mr` queries, a constant, with 4 keys.
INLINE void NAME(score_four)(int mr, const float *queries, const T *const *keys,
                             const T *const *next, int64_t dim, float *scores) {
    vf sums[AT_ONCE][4];
#pragma GCC unroll 8
    for (int r = 0; r < mr; r++)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) sums[r][i] = splat(0);
    for (int64_t d = 0; d < dim; d += PART) {
#pragma GCC unroll 4
        for (int i = 0; i < FETCHED_OF_FOUR; i++) FETCH(next[i] + d);
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++) {
            vf left[AT_ONCE];
#pragma GCC unroll 8
            for (int r = 0; r < mr; r++) left[r] = load_f32(queries + r * dim + d + part * W);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                vf key = LOAD_PART(keys[i] + d, part);
#pragma GCC unroll 8
                for (int r = 0; r < mr; r++) sums[r][i] = multiply_add(left[r], key, sums[r][i]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < mr; r++) store_sums_of_four(sums[r], scores + r * TILE);
}

// Columns [column, column + vectors * W) of out = scale * out + weights @ values: a constant even
// number of vectors <= 4, weights [mr][TILE], out [mr][dim].
INLINE void NAME(weigh_columns)(int mr, int vectors, const float *weights, const T *const *values,
                                const T *const *next, int64_t count, const float *scales,
                                float *out, int64_t dim, int64_t column) {
    vf sums[AT_ONCE][4];
#pragma GCC unroll 8
    for (int r = 0; r < mr; r++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++)
            sums[r][j] = load_f32(out + r * dim + column + j * W) * scales[r];
    for (int64_t key = 0; key < count; key++) {
        if (key % 4 < FETCHED_OF_FOUR)
            for (int64_t b = 0; b < vectors * W; b += LINE / sizeof(T)) FETCH(next[key] + column + b);
        vf left[AT_ONCE];
#pragma GCC unroll 8
        for (int r = 0; r < mr; r++) left[r] = splat_bits(weights + r * TILE + key);
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) {
            vf value = LOAD_PART(values[key] + column + j / 2 * PART, j % 2);
#pragma GCC unroll 8
            for (int r = 0; r < mr; r++) sums[r][j] = multiply_add(left[r], value, sums[r][j]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < mr; r++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++)
            store_f32(out + r * dim + column + j * W, sums[r][j]);
}

INLINE void NAME(score_rows)(int mr, const float *queries, const T *const *keys,
                             const T *const *next, int64_t count, int64_t dim, float *scores) {
    for (int64_t key = 0; key < count; key += 4)
        NAME(score_four)(mr, queries, keys + key, next + key, dim, scores + key);
}

INLINE void NAME(weigh_rows)(int mr, const float *weights, const T *const *values,
                             const T *const *next, int64_t count, const float *scales, float *out,
                             int64_t dim) {
    int64_t column = 0;
    for (; column + 2 * PART <= dim; column += 2 * PART)
        NAME(weigh_columns)(mr, 4, weights, values, next, count, scales, out, dim, column);
    for (; column < dim; column += PART)
        NAME(weigh_columns)(mr, 2, weights, values, next, count, scales, out, dim, column);
}

// `count` keys, a multiple of 16, to scores [mr][TILE].
static __attribute__((noinline)) void NAME(score_keys)(int mr, const float *queries,
                                                       const T *const *keys, const T *const *next,
                                                       int64_t count, int64_t dim, float *scores) {
    const int passes = (mr + AT_ONCE - 1) / AT_ONCE;
    for (int pass = 0; pass < passes; pass++) {
        int r = pass * mr / passes, end = (pass + 1) * mr / passes;
#define CASE(rows)                                                                       \
    case rows:                                                                           \
        NAME(score_rows)(rows, queries + r * dim, keys, next, count, dim, scores + r * TILE); \
        break;
        switch (end - r) { CASES }
#undef CASE
    }
}

// All columns of out = scale * out + weights @ values, as in `weigh_columns`.
static __attribute__((noinline)) void NAME(weigh_values)(int mr, const float *weights,
                                                         const T *const *values,
                                                         const T *const *next, int64_t count,
                                                         const float *scales, float *out,
                                                         int64_t dim) {
    const int passes = (mr + AT_ONCE - 1) / AT_ONCE;
    for (int pass = 0; pass < passes; pass++) {
        int r = pass * mr / passes, end = (pass + 1) * mr / passes;
#define CASE(rows)                                                                            \
    case rows:                                                                                \
        NAME(weigh_rows)(rows, weights + r * TILE, values, next, count, scales + r, out + r * dim, \
                         dim);                                                                \
        break;
        switch (end - r) { CASES }
#undef CASE
    }
}
#undef FETCHED_OF_FOUR
#undef FETCH
