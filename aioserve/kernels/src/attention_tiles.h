// Attention of groups of 16 queries by AMX. Scores are transposed, [keys][16 queries]: each lane of a
// vector is a query, so highest scores and sums need no other lanes. One group is scored and another
// weighed, by AMX, beside the exponentials of a third, in vectors: neither waits for the other. Knows
// nothing of the types of keys and values.
//
// Measured on a Xeon with AMX: a store of a tile stops what follows until its sums are there, so it comes
// after the next vectors; only one of two ports multiplies floats while AMX is in use; and products
// take twice as long where their tiles come from the second-level cache.
#pragma once
#include "plan.h"
#include "tile_config.h"

#define TILE_KEYS 32  // of a tile of weights, in pairs
#define PART_KEYS 64  // packed at a time: these, their scores and weights fit the first-level cache
#define HEADROOM 32   // powers of 2 that a score may exceed the highest so far by, without a new start

// Tiles 0 and 1 are sums, 2 is of scores, 4 and 5 of queries, 6 of keys or values, 7 of weights.
INLINE void begin_attention_tiles(void) {
    tile_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = 16;
    IS_WRITTEN(&config);
    _tile_loadconfig(&config);
}

INLINE void end_attention_tiles(void) { _tile_release(); }

// What a stage does, for one group each: a step has 16 keys, of weighing TILE_KEYS.
typedef struct {
    int steps;
    const float *keys, *queries;  // [16 * steps][lanes] and [lanes][W], in pairs
    float *scores;                // [16 * steps][W]
} scoring;

typedef struct {
    int steps;
    float *scores;
    const float *value_scales;  // null, or one per key, of codes
    float *weights;             // [8 * steps][W], in pairs
    vf max, total;
    int is_too_high;  // a score was above `max`, or not a number
} softening;

typedef struct {
    int steps;
    const float *values, *weights;  // [steps][value_dim][16] and [16 * steps][W], in pairs
    float *sums;                    // [value_dim][W]
} weighing;

INLINE void load_queries(const float *queries, int64_t lanes) {
    _tile_loadd(4, queries, 64);
    if (lanes > 16) _tile_loadd(5, queries + 16 * W, 64);
}

// Up to 32 lanes of the queries are loaded already.
INLINE void score_step(const float *keys, const float *queries, int64_t lanes) {
    _tile_zero(2);
    for (int64_t k = 0; k < lanes; k += 32) {
        if (lanes > 32) load_queries(queries + k * W, lanes - k);
        _tile_loadd(6, keys + k, lanes * sizeof(float));
        _tile_dpbf16ps(2, 6, 4);
        if (k + 16 == lanes) break;
        _tile_loadd(6, keys + k + 16, lanes * sizeof(float));
        _tile_dpbf16ps(2, 6, 5);
    }
}

INLINE void load_sums(const float *sums, int is_pair) {
    _tile_loadd(0, sums, 64);
    if (is_pair) _tile_loadd(1, sums + 16 * W, 64);
}

INLINE void store_sums(float *sums, int is_pair) {
    _tile_stored(0, sums, 64);
    if (is_pair) _tile_stored(1, sums + 16 * W, 64);
}

INLINE void weigh_step(const float *values, const float *weights, int is_pair) {
    _tile_loadd(7, weights, 64);
    _tile_loadd(6, values, 64);
    _tile_dpbf16ps(0, 6, 7);
    if (!is_pair) return;
    _tile_loadd(6, values + 16 * W, 64);
    _tile_dpbf16ps(1, 6, 7);
}

// 2^x to 8e-5 relative, for what is rounded to bfloat16 next; 0 for -inf.
INLINE vf exp2_of_score(vf x) {
    const vf r = (vf)_mm512_reduce_ps((__m512)x, 1);  // x less the whole number below it
    vf p = splat(7.802455e-2f);                        // minimax
    p = p * r + 2.2606718e-1f;
    p = p * r + 6.9583349e-1f;
    p = p * r + 9.9992523e-1f;
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);
}

// Weights of 16 keys, a pair of them in each lane. Returns lanes whose sign is set where that of all of
// their scores, less `max`, and of `below` is.
INLINE vi soften_step(const float *scores, const float *value_scales, float unit, vf max, vf totals[2],
                      float *weights, vi below) {
#pragma GCC unroll 8
    for (int k = 0; k < 16; k += 2) {
        vf even = load_f32(scores + k * W) * unit - max, odd = load_f32(scores + k * W + W) * unit - max;
        below &= (vi)even & (vi)odd;
        even = exp2_of_score(even), odd = exp2_of_score(odd);
        totals[0] += even, totals[1] += odd;
        if (value_scales) even *= value_scales[k], odd *= value_scales[k + 1];
        // to nearest, as by vcvtne2ps2bf16 and a permutation, which take longer
        vu low = ((vu)even + 0x8000) >> 16, high = ((vu)odd + 0x8000) & 0xffff0000;
        store_f32(weights + k / 2 * W, (vf)(low | high));
    }
    return below;
}

// Any of the three may have no steps.
INLINE void run_stage(const scoring *score, softening *soften, const weighing *weigh, int64_t lanes,
                      int64_t value_dim, float unit, int has_codes) {
    const int steps = score->steps > soften->steps ? score->steps : soften->steps;
    const int64_t at_once = (value_dim + 63) / 64;  // of weighing, beside a step of the others
    const float *keys = score->keys, *values = weigh->values, *own_scores = soften->scores;
    const float *value_scales = has_codes ? soften->value_scales : 0;
    float *scores = score->scores, *weights = soften->weights, *sums = weigh->sums, *unstored = 0;
    int64_t rest = weigh->steps ? value_dim : 0;
    int k = 0, is_pair = 0;
    vf totals[2] = {{0}, {0}};
    const vf max = soften->max;
    vi below = (vi){0} - 1;
    IS_WRITTEN(keys);
#define WEIGH                                                                 \
    do {                                                                      \
        if (!k) {                                                             \
            if (unstored) store_sums(unstored, is_pair);                      \
            is_pair = rest > W, unstored = sums, sums += 2 * W * W;           \
            load_sums(unstored, is_pair);                                     \
        }                                                                     \
        weigh_step(values + k * value_dim * W, weigh->weights + k * W * W, is_pair); \
        if (++k == weigh->steps) k = 0, values += 2 * W * W, rest -= 2 * W;   \
    } while (0)
    if (score->steps && lanes <= 32) load_queries(score->queries, lanes);
    for (int step = 0; step < steps; step++) {
        if (step < score->steps) {
            if (step) _tile_stored(2, scores - W * W, 64);
            score_step(keys, score->queries, lanes);
            keys += W * lanes, scores += W * W;
        }
        for (int64_t i = 0; i < at_once && rest > 0; i++) WEIGH;
        if (step < soften->steps) {
            below = soften_step(own_scores, has_codes ? value_scales : 0, unit, max, totals, weights, below);
            own_scores += W * W, weights += W * W / 2;
            if (has_codes) value_scales += W;
        }
    }
    while (rest > 0) WEIGH;
#undef WEIGH
    if (score->steps) _tile_stored(2, scores - W * W, 64);
    if (unstored) store_sums(unstored, is_pair);
    IS_WRITTEN(keys);
    soften->total += totals[0] + totals[1];
    soften->is_too_high = soften->steps && _mm512_movepi32_mask((__m512i)below) != 0xffff;
}

// In lanes with a score above what weights are relative to, they become relative to more than the highest,
// so that few of those to come are above that. Scales `sums` [value_dim][W].
INLINE void raise_max(softening *soften, float unit, float *sums, int64_t value_dim) {
    vf top = splat(-INFINITY), max = soften->max;
    for (int i = 0; i < soften->steps * 16; i++) top = maximum(load_f32(soften->scores + i * W), top);
    top *= unit;
    soften->max = pick(top > max, top + HEADROOM, max);
    const vf scale = exp2_(max - soften->max);
    soften->total *= scale;
    for (int64_t d = 0; d < value_dim; d++) store_f32(sums + d * W, load_f32(sums + d * W) * scale);
}
