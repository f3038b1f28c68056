// Attention of groups of 16 queries by AMX. Scores are transposed, [keys][16 queries]: each lane of a
// vector is a query, so highest scores and sums need no other lanes. One group is scored and another
// weighed, by AMX, beside the exponentials of a third, in vectors: neither waits for the other. Knows
// nothing of the types of keys and values.
//
// Measured on a Xeon with AMX: a store of a tile stops what follows until its sums are there, so it comes
// after the products of two other tiles, and takes as long as half a product; products take twice as long
// where their tiles come from the second-level cache; and a vector that is loaded right after parts of it
// were stored, as of a copied struct, waits for all stores before it.
#pragma once
#include "plan.h"
#include "tile_config.h"

#define TILE_KEYS 32  // of a tile of weights, in pairs
#define PART_KEYS 64  // packed at a time: these, their scores and weights fit the first-level cache
#define HEADROOM 32   // powers of 2 that a score may exceed the highest so far by, without a new start

// Sums or scores are tiles 0 and 1, or 2 and 3; keys or values 4 and 5; queries or weights 6 and 7.
// Weights of less than 2^-126 become 0, as they do in a product: an instruction that makes such a number
// takes as long as a hundred others. Returns what was set before.
INLINE unsigned begin_attention_tiles(void) {
    const unsigned before = _mm_getcsr();
    tile_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = 16;
    IS_WRITTEN(&config);
    _tile_loadconfig(&config);
    _mm_setcsr(before | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
    return before;
}

INLINE void end_attention_tiles(unsigned before) {
    _tile_release();
    _mm_setcsr(before);
}

// What a stage does, for one group each: a step has 16 keys, of weighing TILE_KEYS.
typedef struct {
    int steps;                    // even
    const float *keys, *queries;  // [16 * steps][lanes] and [lanes][W], in pairs
    float *scores;                // [16 * steps][W]
} scoring;

typedef struct {
    int steps;
    float *scores;              // those of the group after it may come where they were
    const float *value_scales;  // null, or one per key, of codes
    float *weights;             // [8 * steps][W], in pairs: where those being weighed are
    float *maxima, *totals;     // [W]
    int is_too_high;            // a score was above its maximum, or not a number
} softening;

typedef struct {
    int steps;
    const float *values, *weights;  // [steps][value_dim][16] and [16 * steps][W], in pairs
    float *sums;                    // [value_dim][W]
} weighing;

// Tiles 0 and 1, or 2 and 3, that are to be written while the others are in use.
typedef struct {
    float *first, *second;  // null: none
    int is_odd;             // 2 and 3
} unwritten_tiles;

INLINE void write_tiles(unwritten_tiles *last) {
    if (!last->first) return;
    if (last->is_odd) {
        _tile_stored(2, last->first, 64);
        if (last->second) _tile_stored(3, last->second, 64);
    } else {
        _tile_stored(0, last->first, 64);
        if (last->second) _tile_stored(1, last->second, 64);
    }
    last->first = 0;
}

INLINE void load_queries(const float *queries, int64_t lanes) {
    _tile_loadd(6, queries, 64);
    if (lanes > 16) _tile_loadd(7, queries + 16 * W, 64);
}

// Scores of twice 16 keys. Up to 32 lanes of the queries are loaded already.
#define SCORE(a, b)                                                            \
    do {                                                                       \
        _tile_zero(a);                                                         \
        _tile_zero(b);                                                         \
        for (int64_t k = 0; k < lanes; k += 32) {                              \
            if (lanes > 32) load_queries(score->queries + k * W, lanes - k);   \
            _tile_loadd(4, keys + k, lanes * sizeof(float));                   \
            _tile_loadd(5, keys + k + 16 * lanes, lanes * sizeof(float));      \
            _tile_dpbf16ps(a, 4, 6);                                           \
            _tile_dpbf16ps(b, 5, 6);                                           \
            if (k + 16 == lanes) break;                                        \
            _tile_loadd(4, keys + k + 16, lanes * sizeof(float));              \
            _tile_loadd(5, keys + k + 16 + 16 * lanes, lanes * sizeof(float)); \
            _tile_dpbf16ps(a, 4, 7);                                           \
            _tile_dpbf16ps(b, 5, 7);                                           \
        }                                                                      \
    } while (0)

// Sums of 32 numbers of values, or of 16.
#define WEIGH(a, b)                                                            \
    do {                                                                       \
        _tile_loadd(a, sums, 64);                                              \
        if (is_pair) _tile_loadd(b, sums + 16 * W, 64);                        \
        _tile_loadd(4, values, 64);                                            \
        if (is_pair) _tile_loadd(5, values + 16 * W, 64);                      \
        _tile_dpbf16ps(a, 4, 6);                                               \
        if (is_pair) _tile_dpbf16ps(b, 5, 6);                                  \
        if (weigh->steps == 1) break;                                          \
        _tile_loadd(4, values + value_dim * W, 64);                            \
        if (is_pair) _tile_loadd(5, values + (value_dim + 16) * W, 64);        \
        _tile_dpbf16ps(a, 4, 7);                                               \
        if (is_pair) _tile_dpbf16ps(b, 5, 7);                                  \
    } while (0)

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
    const __m512i upper_halves = _mm512_set4_epi64(0x00000f0e00000b0a, 0x0000070600000302,
                                                   0x00000f0e00000b0a, 0x0000070600000302);
#pragma GCC unroll 8
    for (int k = 0; k < 16; k += 2) {
        vf even = load_f32(scores + k * W) * unit - max, odd = load_f32(scores + k * W + W) * unit - max;
        below &= (vi)even & (vi)odd;
        even = exp2_of_score(even), odd = exp2_of_score(odd);
        totals[0] += even, totals[1] += odd;
        if (value_scales) even *= value_scales[k], odd *= value_scales[k + 1];
        // to nearest, as by vcvtne2ps2bf16 and a permutation, which take longer
        const __m512i low = (__m512i)((vu)even + 0x8000), high = (__m512i)((vu)odd + 0x8000);
        const __m512i both = _mm512_mask_shuffle_epi8(high, 0x3333333333333333, low, upper_halves);
        store_f32(weights + k / 2 * W, (vf)both);
    }
    return below;
}

// Any of the three may have no steps. Each pair of tiles is written after the products of the next: `last`
// is the one of the stage before.
INLINE void run_stage(const scoring *score, softening *soften, const weighing *weigh,
                      unwritten_tiles *last, int64_t lanes, int64_t value_dim, float unit, int has_codes) {
    const int pairs = weigh->steps ? (value_dim + 2 * W - 1) / (2 * W) : 0, units = soften->steps;
    const int slots = pairs + score->steps / 2;
    unwritten_tiles now = *last;
    int done = 0, slot = 0;
    const float *value_scales = has_codes ? soften->value_scales : 0;
    vf max = {0}, totals[2] = {{0}, {0}};
    vi below = (vi){0} - 1;
    if (units) max = load_f32(soften->maxima);
    IS_WRITTEN(weigh->values);
#define SOFTEN_UNTIL(end)                                                      \
    for (; done < (end); done++)                                               \
        below = soften_step(soften->scores + done * 16 * W,                    \
                            has_codes ? value_scales + done * 16 : 0, unit, max,\
                            totals, soften->weights + done * 8 * W, below);
    if (!slots) write_tiles(&now);
    if (pairs) {
        _tile_loadd(6, weigh->weights, 64);
        if (weigh->steps > 1) _tile_loadd(7, weigh->weights + 16 * W, 64);
        IS_WRITTEN(weigh->weights);  // not before
    }
    for (int pair = 0; pair < pairs; pair++) {
        float *const sums = weigh->sums + pair * 2 * W * W;
        const float *const values = weigh->values + pair * 2 * W * W;
        const int is_pair = value_dim - pair * 2 * W > W, is_odd = !now.is_odd;
        if (is_odd) WEIGH(2, 3);
        else WEIGH(0, 1);
        slot++;
        write_tiles(&now);
        SOFTEN_UNTIL(units * slot / slots)
        now = (unwritten_tiles){sums, is_pair ? sums + 16 * W : 0, is_odd};
    }
    if (score->steps && lanes <= 32) load_queries(score->queries, lanes);
    for (int step = 0; step < score->steps; step += 2) {
        float *const scores = score->scores + step * W * W;
        const float *const keys = score->keys + step * W * lanes;
        const int is_odd = !now.is_odd;
        if (is_odd) SCORE(2, 3);
        else SCORE(0, 1);
        slot++;
        const int needed = step < units ? step : units;  // lies where the step before is written
        SOFTEN_UNTIL(needed)
        write_tiles(&now);
        SOFTEN_UNTIL(units * slot / slots)
        now = (unwritten_tiles){scores, scores + 16 * W, is_odd};
    }
    SOFTEN_UNTIL(units)
#undef SOFTEN_UNTIL
    *last = now;
    IS_WRITTEN(weigh->values);
    if (!units) return;
    store_f32(soften->totals, load_f32(soften->totals) + (totals[0] + totals[1]));
    soften->is_too_high = _mm512_movepi32_mask((__m512i)below) != 0xffff;
}
#undef SCORE
#undef WEIGH

// In lanes with a score above what weights are relative to, they become relative to more than the highest,
// so that few of those to come are above that. Scales `sums` [value_dim][W].
INLINE void raise_max(const float *scores, int count, float unit, float *maxima, float *totals,
                      float *sums, int64_t value_dim) {
    const vf max = load_f32(maxima);
    vf top = splat(-INFINITY);
    for (int i = 0; i < count; i++) top = maximum(load_f32(scores + i * W), top);
    top *= unit;
    const vf raised = pick(top > max, top + HEADROOM, max), scale = exp2_(max - raised);
    store_f32(maxima, raised);
    store_f32(totals, load_f32(totals) * scale);
    for (int64_t d = 0; d < value_dim; d++) store_f32(sums + d * W, load_f32(sums + d * W) * scale);
}
