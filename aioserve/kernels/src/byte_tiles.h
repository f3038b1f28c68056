// The products of byte_lanes.h for any number of rows: 16 at once where AMX multiplies bytes. It gives the
// same integers.
#pragma once
#include "byte_lanes.h"

#ifdef __AMX_INT8__
#include "tile_config.h"

#define BYTE_ROWS 16  // at once, at most

// Tiles 0 to 3 are sums, 4 is of queries and 5 of weights, 6 is of keys and 7 of values.
INLINE void begin_byte_tiles(void) {
    tile_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = 16;
    config.row_bytes[5] = TOGETHER, config.rows[7] = TOGETHER / 4;
    IS_WRITTEN(&config);
    _tile_loadconfig(&config);
}

INLINE void end_byte_tiles(void) { _tile_release(); }

// `score_codes` of 16 queries.
static void score_by_tiles(const float *queries, int64_t lanes, const float *keys, int64_t count,
                           float *sums) {
    IS_WRITTEN(queries);
    int64_t c = 0;
#define ADD_KEYS(tile)                                                      \
    _tile_loadd(6, keys + k * TILE + c + 16 * tile, TILE * sizeof(float));  \
    _tile_dpbsud(tile, 4, 6)
#define STORE_SUMS(tile) _tile_stored(tile, sums + c + 16 * tile, TILE * sizeof(float))
    for (; c + 64 <= count; c += 64) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < lanes; k += 16) {
            _tile_loadd(4, queries + k, lanes * sizeof(float));
            ADD_KEYS(0);
            ADD_KEYS(1);
            ADD_KEYS(2);
            ADD_KEYS(3);
        }
        STORE_SUMS(0);
        STORE_SUMS(1);
        STORE_SUMS(2);
        STORE_SUMS(3);
    }
    for (; c < count; c += 32) {
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t k = 0; k < lanes; k += 16) {
            _tile_loadd(4, queries + k, lanes * sizeof(float));
            ADD_KEYS(0);
            ADD_KEYS(1);
        }
        STORE_SUMS(0);
        STORE_SUMS(1);
    }
#undef ADD_KEYS
#undef STORE_SUMS
}

// out [16][columns], 64 columns, += shares[r][0] * sums.
INLINE void add_sums_of_tiles(const float sums[16][64], float (*shares)[TILE / TOGETHER], float *out,
                              int64_t columns) {
    for (int r = 0; r < 16; r++)
#pragma GCC unroll 4
        for (int j = 0; j < 64; j += W) {
            float *const to = out + r * columns + j;
            store_f32(to, multiply_add(to_floats((vi)load_f32(sums[r] + j)), splat(shares[r][0]),
                                       load_f32(to)));
        }
}

// `weigh_codes` of 16 rows. While some sums are made, those before them are added.
static void weigh_by_tiles(const float *weights, const float *values, int64_t columns,
                           int64_t count, float (*shares)[TILE / TOGETHER], float *out) {
    float sums[2][16][64] __attribute__((aligned(64)));
    const int64_t parts = columns / 64, all = count / TOGETHER * parts;
    IS_WRITTEN(weights);
    for (int64_t n = 0; n <= all; n++) {
        const int64_t i = n / parts, c = n % parts * 64;
        if (n < all) {
            const float *const own = values + i * (TOGETHER / 4) * columns + c;
            float *const to = sums[n & 1][0];
            _tile_loadd(5, weights + i * (TOGETHER / 4), TILE);
#define MULTIPLY(tile)                                        \
    _tile_zero(tile);                                         \
    _tile_loadd(7, own + 16 * tile, columns * sizeof(float)); \
    _tile_dpbusd(tile, 5, 7)
            MULTIPLY(0);
            MULTIPLY(1);
            MULTIPLY(2);
            MULTIPLY(3);
#undef MULTIPLY
            _tile_stored(0, to, sizeof sums[0][0]);
            _tile_stored(1, to + 16, sizeof sums[0][0]);
            _tile_stored(2, to + 32, sizeof sums[0][0]);
            _tile_stored(3, to + 48, sizeof sums[0][0]);
        }
        if (n) {
            const int64_t before = (n - 1) / parts;
            add_sums_of_tiles(sums[(n - 1) & 1], (void *)&shares[0][before],
                              out + (n - 1) % parts * 64, columns);
        }
    }
}

#else
#define BYTE_ROWS MAX_ROWS
INLINE void begin_byte_tiles(void) {}
INLINE void end_byte_tiles(void) {}
#endif

// How many rows to multiply at once, if so many are left: about as many each time.
INLINE int rows_at_once(int64_t left) {
    if (BYTE_ROWS > MAX_ROWS && left >= BYTE_ROWS) return BYTE_ROWS;
    const int64_t times = (left + MAX_ROWS - 1) / MAX_ROWS;
    return (left + times - 1) / times;
}

// `score_codes` of as many queries.
static void score_rows_at_once(int mr, const float *queries, int64_t lanes, const float *keys,
                               int64_t count, float *sums) {
#ifdef __AMX_INT8__
    if (mr > MAX_ROWS) {
        score_by_tiles(queries, lanes, keys, count, sums);
        return;
    }
#endif
    score_codes(mr, queries, lanes, keys, count, sums);
}

// `weigh_codes` of as many rows.
static void weigh_rows_at_once(int mr, const float *weights, const float *values, int64_t columns,
                               int64_t count, float (*shares)[TILE / TOGETHER], float *out) {
#ifdef __AMX_INT8__
    if (mr > MAX_ROWS) {
        weigh_by_tiles(weights, values, columns, count, shares, out);
        return;
    }
#endif
    weigh_codes(mr, weights, values, columns, count, shares, out);
}
