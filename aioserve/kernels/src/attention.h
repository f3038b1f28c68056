// Attention of packed queries over a paged KV cache, after FlashAttention-2 (Dao, 2023) and
// Flash-Decoding. Included twice per element type: T, LOAD, STORE, NAME; DOTS where dot products
// of bfloat16 pairs pay: a lane of 32 bits is then two numbers, else one float. TILES where AMX makes
// such products of packed keys and values (attention_many.h), and those that lie in the cache become
// floats. First for K and V as they are, then as codes (codes.h): CODES; K, LOAD_K, ROW, OVER. Codes are
// whole numbers, so they are exact in every type: scores are multiplied by the scales of their keys, and
// weights by those of their values.
//
// The work is cut into items: some queries of one row, all their heads of one KV head, a range of
// keys. Rows of few queries that read the same blocks there, a prefix in common, are one item. An
// item walks its keys in tiles, each packed once for all of its queries, or read directly for few
// (direct.h, direct_pairs.h). Where a tile or an item begins depends on positions alone, and how a
// query meets it on its own row: a token's result does not depend on the other rows of the step,
// nor on the number of threads.

#ifdef DOTS
#define STEP 2  // numbers per lane
#define EXP2 exp2_rough
#define MULTIPLY multiply_pairs
#else
#define STEP 1
#if W == 8
#define EXP2(x) (sizeof(T) == 2 ? exp2_rough(x) : exp2_(x))
#else
#define EXP2 exp2_
#endif
#define MULTIPLY multiply_floats
#endif
#define MOST_ROWS (MAX_ROWS > DIRECT_ROWS ? MAX_ROWS : DIRECT_ROWS)
#ifdef CODES  // read directly they become floats
#define DIRECT_STEP 1
#define SCORE_KEYS score_keys_codes
#define WEIGH_VALUES weigh_values_codes
#define LOAD_QUERY(query, d) LOAD((query) + (d))
#else
#ifdef TILES
#define EVEN_FETCHES 1  // see places.h
#endif
#define DIRECT_STEP STEP
#define SCORE_KEYS NAME(score_keys)
#define WEIGH_VALUES NAME(weigh_values)
#define LOAD_QUERY(query, d) LOAD_PART((query) + (d) / PART * PART, (d) / W % 2)
#endif

#ifndef EVEN_FETCHES
#define EVEN_FETCHES 0
#endif

#include "places.h"

#if defined(DOTS) || defined(TILES)
// Up to 2 * W of the `n` numbers at x, in pairs, the rest 0.
INLINE vf OVER(load_pairs)(const K *x, int64_t n) {
#ifdef CODES
    __m256i codes = _mm256_zextsi128_si256(_mm_loadu_si128((const void *)x));
    if (n >= 2 * W) codes = _mm256_loadu_si256((const void *)x);
    vi both = (vi)_mm512_cvtepu16_epi32(codes);
    return (vf)((vu)to_floats(both << 24 >> 24) >> 16 | (vu)to_floats(both << 16 >> 24));
#else
    if (n < 2 * W) return (vf)_mm512_zextsi256_si512(_mm256_loadu_si256((const void *)x));
    return load_f32((const float *)x);
#endif
}
#endif

// `count` rows of one token each to lanes [key_dim / STEP][TILE]: queries meet keys lane by lane.
// `next` are the rows of the tile after this one.
static void OVER(pack_keys)(const K *const *keys, const K *const *next, int64_t count,
                            int64_t key_dim, float *packed) {
    for (int64_t key = 0; key < count; key += W) {
        for (int i = 0; i < W; i++) OVER(prefetch)(next[key + i], key_dim);
        for (int64_t d = 0; d < key_dim; d += W * STEP) {
            vf lanes[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; i++)
#if STEP == 2
                lanes[i] = OVER(load_pairs)(keys[key + i] + d, key_dim - d);
#else
                lanes[i] = LOAD_K(keys[key + i] + d);
#endif
            transpose(lanes);
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) store_f32(packed + (d / STEP + i) * TILE + key, lanes[i]);
        }
    }
}

// `count` rows to lanes [count / STEP][value_dim].
static void OVER(pack_values)(const K *const *values, const K *const *next, int64_t count,
                              int64_t value_dim, float *packed) {
    for (int64_t key = 0; key < count; key += STEP) {
        for (int i = 0; i < STEP; i++) OVER(prefetch)(next[key + i], value_dim);
        for (int64_t d = 0; d < value_dim; d += W, packed += W) {
#if STEP == 2
            vu low = (vu)LOAD_K(values[key] + d), high = (vu)LOAD_K(values[key + 1] + d);
            store_f32(packed, (vf)(low >> 16 | high));
#else
            store_f32(packed, LOAD_K(values[key] + d));
#endif
        }
    }
}

// One row of scores to weights relative to the highest so far; returns what scales earlier ones.
// Keys [begin, end) of columns [first, last) are visible. `scales`, of codes: [2][TILE], of keys and
// of values. `step`: 2 for weights in bfloat16, else 1.
INLINE float OVER(soften)(const attention *args, const float *scales, int step, float *scores,
                          float *weights, int64_t first, int64_t last, int64_t begin, int64_t end,
                          float *max, float *totals) {
#ifdef CODES
    for (int64_t c = first; c < last; c += W)
        store_f32(scores + c, load_f32(scores + c) * load_f32(scales + c));
#endif
    if (args->softcap > 0)
        for (int64_t c = first; c < last; c += W) {
            vf e = exp_(load_f32(scores + c) * (2 * args->scaling / args->softcap));
            vf tanh = 1.f - 2.f / (e + 1.f);
            store_f32(scores + c, tanh * (args->softcap / args->scaling));
        }
    if (begin > first || end < last)
        for (int64_t c = first; c < last; c += W) {
            vi column = INDEXES + (int32_t)c;
            vi is_visible = (column >= (int32_t)begin) & (column < (int32_t)end);
            store_f32(scores + c, pick(is_visible, load_f32(scores + c), splat(-INFINITY)));
        }
    vf top = splat(-INFINITY), sums = {0};
    for (int64_t c = first; c < last; c += W) top = maximum(load_f32(scores + c), top);
    float unit = args->scaling * LOG2E, scale = 1, new_max = highest(top) * unit;
    if (new_max > *max) scale = EXP2(splat(*max - new_max))[0], *max = new_max;
    for (int64_t c = first; c < last; c += W) {
        vf p = EXP2(load_f32(scores + c) * unit - *max);
        sums += p;
#ifdef CODES
        p *= load_f32(scales + TILE + c);
#endif
        if (step == 2) store_bf16((bf16 *)weights + c, p);
        else store_f32(weights + c, p);
    }
    store_f32(totals, load_f32(totals) * scale + sums);
    return scale;
}

#ifdef TILES
#include "attention_many.h"
#endif

// `after` is what this thread will probably do next, or null: its first tile is fetched meanwhile.
static void OVER(attend_item)(const attention *args, const item *work, const item *after,
                              OVER(places) *places) {
    const int64_t group = args->q_heads / args->kv_heads, rows = work->tokens * group;
    const int64_t key_dim = args->key_dim, value_dim = args->value_dim;
    const int64_t position = work->position;
    const int is_direct = work->is_direct && key_dim % (2 * W) == 0 && value_dim % (2 * W) == 0;
#ifdef TILES
    if (!is_direct) {
        OVER(attend_many)(args, work, after, places);
        return;
    }
#endif
    const int most = is_direct ? DIRECT_ROWS : MAX_ROWS, step = is_direct ? DIRECT_STEP : STEP;
    const int64_t lanes = key_dim / step, padded_lanes = (lanes + W - 1) / W * W;

    float scratch[rows * (lanes + value_dim + 1 + W) + TILE * (padded_lanes + value_dim / step) +
                  2 * MOST_ROWS * TILE] __attribute__((aligned(64)));
    float *keys = scratch, *values = keys + TILE * padded_lanes;
    float *scores = values + TILE * value_dim / step, *weights = scores + MOST_ROWS * TILE;
    float *out = weights + MOST_ROWS * TILE, *queries = out + rows * value_dim;
    float *totals = queries + rows * lanes, *maxima = totals + rows * W;  // W parts of each

    for (int64_t r = 0; r < rows; r++) {
        int64_t head = work->kv_head * group + r % group;
        const T *query = (const T *)args->query +
                         work->queries[r / group] * args->query_token_stride +
                         head * args->query_head_stride;
        if (step == 2) memcpy(queries + r * lanes, query, key_dim * sizeof(T));
        else for (int64_t d = 0; d < key_dim; d += W)
            store_f32(queries + r * lanes + d, is_direct ? LOAD_QUERY(query, d) : LOAD(query + d));
        int has_sink = args->sinks && is_first_piece(args, work, r / group);
        maxima[r] = has_sink ? args->sinks[head] * LOG2E : NOTHING_SEEN;
        store_f32(totals + r * W, (vf){has_sink});
    }
    memset(out, 0, rows * value_dim * sizeof(float));

    for (int64_t tile = work->start; tile < work->end_key; tile += work->tile) {
        int64_t begin = work->first_key > tile ? work->first_key - tile : 0;
        int64_t end = smaller(work->end_key - tile, work->tile);
        int64_t last = (end + 15) / 16 * 16;
        OVER(rows) *own = OVER(enter_tile)(args, work, tile, last, after, places);
        OVER(rows) *next = places->ring + places->now, *far = places->ring + (places->now + 1) % 3;
        const K **key_rows = own->keys, **value_rows = own->values;
        const K **next_keys = next->keys, **next_values = next->values;
        const int is_far = is_direct && !EVEN_FETCHES;
        if (is_far) OVER(prefetch_far)(far->keys, far->work->tile, key_dim);
        float scales_of_keys[2][TILE] __attribute__((aligned(64)));
#ifdef CODES
        for (int64_t i = 0; i < last; i++) {
            scales_of_keys[0][i] = scale_of(key_rows[i], key_dim);
            scales_of_keys[1][i] = scale_of(value_rows[i], value_dim);
        }
#endif
        if (!is_direct) {
            OVER(pack_keys)(key_rows, next_keys, last, key_dim, keys);
            OVER(pack_values)(value_rows, next_values, last, value_dim, values);
        }

        for (int64_t r = 0; r < rows; r += most) {
            int mr = rows - r < most ? rows - r : most;
            // columns that the first of these queries may still see, and the last may already
            int64_t from = larger(begin, first_seen(args, position + r / group) - tile);
            int64_t to = smaller(end, end_seen(args, work, (r + mr - 1) / group) - tile);
            if (from >= to) continue;
            from = from / 16 * 16;
            to = (to + 15) / 16 * 16;
            if (is_direct)
                SCORE_KEYS(mr, queries + r * lanes, key_rows + from, next_keys + from, to - from,
                           lanes, scores + from);
            else
                MULTIPLY(mr, queries + r * lanes, lanes, keys + from, TILE, lanes, to - from,
                               0, scores + from, TILE);
            float scales[MOST_ROWS];
            for (int i = 0; i < mr; i++) {
                int64_t token = (r + i) / group;
                int64_t start = larger(begin, first_seen(args, position + token) - tile);
                int64_t stop = smaller(end, end_seen(args, work, token) - tile);
#define SOFTEN(step)                                                                                    \
    OVER(soften)(args, scales_of_keys[0], step, scores + i * TILE, weights + i * (TILE / step), from, to, \
                 start, stop, &maxima[r + i], totals + (r + i) * W)
                if (EVEN_FETCHES && is_direct && !r)
                    OVER(prefetch_fourths)(next, from, to, i, mr, key_dim, value_dim);
                scales[i] = is_direct ? SOFTEN(DIRECT_STEP) : SOFTEN(STEP);
#undef SOFTEN
            }
            if (is_far && !r) OVER(prefetch_far)(far->values, far->work->tile, value_dim);
            if (is_direct)
                WEIGH_VALUES(mr, weights + from / step, value_rows + from, next_values + from,
                             to - from, scales, out + r * value_dim, value_dim);
            else
                MULTIPLY(mr, weights + from / STEP, TILE / STEP,
                               values + from / STEP * value_dim, value_dim, (to - from) / STEP,
                               value_dim, scales, out + r * value_dim, value_dim);
        }
    }

#if !defined(DOTS) && !defined(CODES)
    if (is_direct)
        for (int64_t d = 0; d < rows * value_dim; d += PART) ORDER_PARTS(out + d);
#endif
    for (int64_t r = 0; r < rows; r++) {
        float total = sum(load_f32(totals + r * W));
        int64_t token = work->queries[r / group], head = work->kv_head * group + r % group;
        if (work->pieces > 1) {  // other pieces of this context are elsewhere
            int64_t place = work->piece * args->q_heads + head;
            float *sums = work->partials[token] + place * (value_dim + 2);
            memcpy(sums, out + r * value_dim, value_dim * sizeof(float));
            sums[value_dim] = maxima[r], sums[value_dim + 1] = total;
            continue;
        }
        T *result = (T *)args->out + (token * args->q_heads + head) * value_dim;
        for (int64_t d = 0; d < value_dim; d += W)
            STORE(result + d, load_f32(out + r * value_dim + d) * (1.f / total));
    }
}

#ifndef CODES
// Put together the pieces of one context, first to last; `work` is the last.
static void NAME(combine)(const attention *args, const item *work) {
    const int64_t group = args->q_heads / args->kv_heads, value_dim = args->value_dim;
    const int64_t count = work->pieces, size = args->q_heads * (value_dim + 2);
    for (int64_t r = 0; r < work->tokens * group; r++) {
        int64_t token = work->queries[r / group], head = work->kv_head * group + r % group;
        T *result = (T *)args->out + (token * args->q_heads + head) * value_dim;
        const float *sums = work->partials[token] + head * (value_dim + 2);
        const float *maxima = sums + value_dim, *totals = maxima + 1;
        float max = NOTHING_SEEN, total = 0, shares[count];
        for (int64_t i = 0; i < count; i++) max = maxima[i * size] > max ? maxima[i * size] : max;
        for (int64_t i = 0; i < count; i++) {
            shares[i] = exp2_(splat(maxima[i * size] - max))[0];
            total += shares[i] * totals[i * size];
        }
        for (int64_t d = 0; d < value_dim; d += W) {
            vf v = {0};
            for (int64_t i = 0; i < count; i++) v += shares[i] * load_f32(sums + i * size + d);
            STORE(result + d, v * (1.f / total));  // as of a context that is one piece
        }
    }
}
#endif

#include "paged_attention.h"

#undef STEP
#undef EXP2
#undef MULTIPLY
#undef MOST_ROWS
#undef DIRECT_STEP
#undef EVEN_FETCHES
#undef SCORE_KEYS
#undef WEIGH_VALUES
#undef LOAD_QUERY
