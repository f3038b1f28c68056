// The products of attention.h by AMX: 16 queries at once, against keys and values in pairs of bfloat16, which
// lie as its tiles want them. A row of a tile does not depend on the others.
#pragma once
#include "plan.h"
#include "tile_config.h"

#define QUERY_ROWS 16  // at once
#define TILE_KEYS 32   // of a tile of weights

// Tiles 0 to 3 are sums, 4 is of queries or weights, 5 to 7 are of keys or values.
INLINE void begin_attention_tiles(void) {
    tile_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = 16;
    IS_WRITTEN(&config);
    _tile_loadconfig(&config);
}

INLINE void end_attention_tiles(void) { _tile_release(); }

// Sums of 16 rows and `count` columns, 64 at a time: `FIRST(tile)` gives what they begin with.
#define SUMS_OF_TILES(a, a_stride, b, b_stride, lanes, out, out_stride, count, FIRST)                \
    do {                                                                                             \
        int64_t c = 0;                                                                               \
        for (; c + 64 <= (count); c += 64) {                                                         \
            FIRST(0);                                                                                \
            FIRST(1);                                                                                \
            FIRST(2);                                                                                \
            FIRST(3);                                                                                \
            for (int64_t k = 0; k < (lanes); k += 16) {                                              \
                const float *own = (b) + k * (b_stride) + c;                                         \
                _tile_loadd(4, (a) + k, (a_stride) * sizeof(float));                                 \
                _tile_loadd(5, own, (b_stride) * sizeof(float));                                     \
                _tile_dpbf16ps(0, 4, 5);                                                             \
                _tile_loadd(6, own + 16, (b_stride) * sizeof(float));                                \
                _tile_dpbf16ps(1, 4, 6);                                                             \
                _tile_loadd(7, own + 32, (b_stride) * sizeof(float));                                \
                _tile_dpbf16ps(2, 4, 7);                                                             \
                _tile_loadd(5, own + 48, (b_stride) * sizeof(float));                                \
                _tile_dpbf16ps(3, 4, 5);                                                             \
            }                                                                                        \
            _tile_stored(0, (out) + c, (out_stride) * sizeof(float));                                \
            _tile_stored(1, (out) + c + 16, (out_stride) * sizeof(float));                           \
            _tile_stored(2, (out) + c + 32, (out_stride) * sizeof(float));                           \
            _tile_stored(3, (out) + c + 48, (out_stride) * sizeof(float));                           \
        }                                                                                            \
        for (; c < (count); c += 16) {                                                               \
            FIRST(0);                                                                                \
            for (int64_t k = 0; k < (lanes); k += 16) {                                              \
                _tile_loadd(4, (a) + k, (a_stride) * sizeof(float));                                 \
                _tile_loadd(5, (b) + k * (b_stride) + c, (b_stride) * sizeof(float));                \
                _tile_dpbf16ps(0, 4, 5);                                                             \
            }                                                                                        \
            _tile_stored(0, (out) + c, (out_stride) * sizeof(float));                                \
        }                                                                                            \
    } while (0)

// Scores of 16 queries [16][lanes], lanes a multiple of 16, and `count` keys [lanes][TILE].
static void score_by_pairs(const float *queries, int64_t lanes, const float *keys, int64_t count,
                           float *scores) {
    IS_WRITTEN(queries);
#define FIRST(tile) _tile_zero(tile)
    SUMS_OF_TILES(queries, lanes, keys, TILE, lanes, scores, TILE, count, FIRST);
#undef FIRST
}

// out [16][value_dim] = scales * out + weights [16][TILE / 2] @ values [count / 2][value_dim], where
// `count` is a multiple of TILE_KEYS; scales of `mr` rows.
static void weigh_by_pairs(int mr, const float *weights, const float *values, int64_t count,
                           const float *scales, float *out, int64_t value_dim) {
    for (int r = 0; r < mr; r++)
        if (scales[r] != 1)
            for (int64_t d = 0; d < value_dim; d += W)
                store_f32(out + r * value_dim + d, load_f32(out + r * value_dim + d) * scales[r]);
    IS_WRITTEN(weights);
    IS_WRITTEN(out);
#define FIRST(tile) _tile_loadd(tile, out + c + 16 * tile, value_dim * sizeof(float))
    SUMS_OF_TILES(weights, TILE / 2, values, value_dim, count / 2, out, value_dim, value_dim, FIRST);
#undef FIRST
}
#undef SUMS_OF_TILES
