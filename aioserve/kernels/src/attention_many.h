// Items of many queries of one row, and of any number where K and V do not lie as they could be read
// directly, by attention_tiles.h. Included by attention.h, where there are TILES: T, STORE, NAME; K,
// LOAD_K, ROW, OVER, CODES.

// `count` rows, in pairs, to [count][lanes]; what is behind `dim` numbers becomes 0.
static void OVER(pack_keys_for_tiles)(const K *const *keys, int64_t count, int64_t dim, int64_t lanes,
                                      float *packed) {
    for (int64_t key = 0; key < count; key++, packed += lanes)
        for (int64_t d = 0; d < dim; d += 2 * W)
            store_f32(packed + d / 2, OVER(load_pairs)(keys[key] + d, dim - d));
}

// `count` rows to [count / 32][dim][16]: a lane has the same column of two of them.
static void OVER(pack_values_for_tiles)(const K *const *values, int64_t count, int64_t dim,
                                        float *packed) {
    for (int64_t key = 0; key < count; key += TILE_KEYS)
        for (int64_t d = 0; d < dim; d += W, packed += W * W) {
            vf lanes[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) {
                const K *const *pair = values + key + 2 * i;
                lanes[i] = (vf)((vu)LOAD_K(pair[0] + d) >> 16 | (vu)LOAD_K(pair[1] + d));
            }
            transpose(lanes);
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) store_f32(packed + i * W, lanes[i]);
        }
}

// Which columns of a part any query of a group sees, and whether some do not see all of them.
typedef struct {
    int64_t group;
    int32_t from, to;
    int is_masked;
} OVER(seen);

static __attribute__((noinline)) void OVER(stage)(const scoring *score, softening *soften,
                                                  const weighing *weigh, unwritten_tiles *last,
                                                  const attention *args) {
    const int64_t lanes = (args->key_dim / 2 + W - 1) / W * W;
#ifdef CODES
    run_stage(score, soften, weigh, last, lanes, args->value_dim, args->scaling * LOG2E, 1);
#else
    run_stage(score, soften, weigh, last, lanes, args->value_dim, args->scaling * LOG2E, 0);
#endif
}

// Scores [to - from][W] of a part as they are to be softened. Its columns [begin, end) are the item's keys.
static void OVER(finish_scores)(const attention *args, float *scores, const OVER(seen) *s, int64_t position,
                                int32_t begin, int32_t end, const float *key_scales, const int32_t *first,
                                const int32_t *behind) {
    vi firsts, ends;
    memcpy(&firsts, first, sizeof firsts), memcpy(&ends, behind, sizeof ends);
    for (int32_t c = s->from; c < s->to; c++, scores += W) {
        const int32_t at = position + c;
        vf v = load_f32(scores);
        if (key_scales) v *= key_scales[c];
        if (args->softcap > 0) {
            const vf e = exp_(v * (2 * args->scaling / args->softcap));
            v = (1.f - 2.f / (e + 1.f)) * (args->softcap / args->scaling);
        }
        const vi is_seen = (firsts <= at) & (ends > at) & ((vi){0} - (c >= begin && c < end));
        store_f32(scores, s->is_masked ? pick(is_seen, v, splat(-INFINITY)) : v);
    }
}

static void OVER(attend_many)(const attention *args, const item *work, const item *after,
                              OVER(places) *places) {
    const int64_t heads = args->q_heads / args->kv_heads, rows = work->tokens * heads;
    const int64_t key_dim = args->key_dim, value_dim = args->value_dim;
    const int64_t lanes = (key_dim / 2 + W - 1) / W * W, groups = (rows + W - 1) / W;
    const float unit = args->scaling * LOG2E;

    float scratch[PART_KEYS * (lanes + value_dim / 2 + 5 * W / 2) + groups * W * (lanes + value_dim + 2)]
        __attribute__((aligned(64)));
    float *keys = scratch, *values = keys + PART_KEYS * lanes;
    float *scores = values + PART_KEYS / 2 * value_dim, *again = scores + PART_KEYS * W;
    float *weights = again + PART_KEYS * W, *queries = weights + PART_KEYS / 2 * W;
    float *sums = queries + groups * W * lanes, *totals = sums + groups * W * value_dim;
    float *maxima = totals + groups * W;
    int32_t first[groups * W], behind[groups * W];  // positions that each query sees
    OVER(seen) seen[groups];

    T nothing[key_dim];
    memset(nothing, 0, sizeof nothing);
    memset(sums, 0, groups * W * value_dim * sizeof(float));
    for (int64_t g = 0; g < groups; g++) {
        const T *own[W];
        for (int64_t r = g * W; r < (g + 1) * W; r++) {
            const int64_t token = smaller(r, rows - 1) / heads, head = work->kv_head * heads + r % heads;
            const int has_sink = r < rows && args->sinks && is_first_piece(args, work, token);
            own[r % W] = r >= rows ? nothing
                                   : (const T *)args->query +
                                         work->queries[token] * args->query_token_stride +
                                         head * args->query_head_stride;
            maxima[r] = has_sink ? args->sinks[head] * LOG2E : NOTHING_SEEN;
            totals[r] = has_sink;
            first[r] = first_seen(args, work->position + token);
            behind[r] = end_seen(args, work, token);
        }
        for (int64_t d = 0; d < key_dim; d += 2 * W) {
            vf v[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) v[i] = NAME(load_pairs)(own[i] + d, key_dim - d);
            transpose(v);
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) store_f32(queries + (g * lanes + d / 2 + i) * W, v[i]);
        }
    }

    const unsigned settings = begin_attention_tiles();
    unwritten_tiles unwritten = {0};
    for (int64_t tile = work->start; tile < work->end_key; tile += work->tile) {
        const int32_t tile_end = smaller(work->end_key - tile, work->tile);
        const int32_t fetched_from = (tile_end + TILE_KEYS - 1) / TILE_KEYS * TILE_KEYS;
        const OVER(rows) *own = OVER(enter_tile)(args, work, tile, fetched_from, after, places);
        const OVER(rows) *next = places->ring + places->now;

        for (int32_t part = 0; part < tile_end; part += PART_KEYS) {
            const int64_t position = tile + part;
            const int32_t begin = larger(work->first_key - position, 0);
            const int32_t end = smaller(tile_end - part, PART_KEYS);
            const int32_t last = (end + TILE_KEYS - 1) / TILE_KEYS * TILE_KEYS;
            OVER(pack_keys_for_tiles)(own->keys + part, last, key_dim, lanes, keys);
            OVER(pack_values_for_tiles)(own->values + part, last, value_dim, values);
            const float *key_scales = 0;
#ifdef CODES
            float scales[2][PART_KEYS];
            for (int i = 0; i < last; i++) {
                scales[0][i] = scale_of(own->keys[part + i], key_dim);
                scales[1][i] = scale_of(own->values[part + i], value_dim);
            }
            key_scales = scales[0];
#endif
            int64_t count = 0, fetched = 0;
            for (int64_t g = 0; g < groups; g++) {
                const int32_t *firsts = first + g * W, *ends = behind + g * W;
                const int32_t from = larger(firsts[0] - position, begin);
                const int32_t to = smaller(ends[W - 1] - position, end);
                if (from >= to) continue;
                OVER(seen) *s = seen + count++;
                s->group = g, s->from = from / TILE_KEYS * TILE_KEYS;
                s->to = (to + TILE_KEYS - 1) / TILE_KEYS * TILE_KEYS;
                s->is_masked = larger(firsts[W - 1] - position, begin) > s->from ||
                               smaller(ends[0] - position, end) < s->to;
            }

            for (int64_t i = 0; i < count + 2; i++) {
                for (; fetched * (count + 2) < last * (i + 1); fetched++) {
                    OVER(prefetch)(next->keys[part + fetched], key_dim);
                    OVER(prefetch)(next->values[part + fetched], value_dim);
                }
                scoring score = {0};
                softening soften = {0};
                weighing weigh = {0};
                if (i < count) {
                    const OVER(seen) *s = seen + i;
                    score.steps = (s->to - s->from) / W, score.keys = keys + s->from * lanes;
                    score.queries = queries + s->group * W * lanes, score.scores = scores;
                }
                if (i > 1) {
                    const OVER(seen) *s = seen + i - 2;
                    weigh.steps = (s->to - s->from) / TILE_KEYS;
                    weigh.values = values + s->from / 2 * value_dim;
                    weigh.weights = weights, weigh.sums = sums + s->group * W * value_dim;
                }
                if (i < 1 || i > count) {
                    OVER(stage)(&score, &soften, &weigh, &unwritten, args);
                    continue;
                }
                const OVER(seen) *s = seen + i - 1;
                const int64_t r = s->group * W, is_first = position == work->start;
                soften.steps = (s->to - s->from) / W, soften.scores = scores, soften.weights = weights;
                soften.maxima = maxima + r, soften.totals = totals + r;
#ifdef CODES
                soften.value_scales = scales[1] + s->from;
#endif
                const int is_plain = !key_scales && args->softcap <= 0 && !s->is_masked;
                if (!is_plain || is_first) write_tiles(&unwritten);
#define FINISH(scores)                                                                                 \
    if (!is_plain)                                                                                     \
    OVER(finish_scores)(args, scores, s, position, begin, end, key_scales, first + r, behind + r)
#define RAISE(scores)                                                                                  \
    raise_max(scores, s->to - s->from, unit, maxima + r, totals + r, sums + r * value_dim, value_dim)
                FINISH(scores);
                if (is_first) RAISE(scores);
                const vf before = load_f32(totals + r);
                OVER(stage)(&score, &soften, &weigh, &unwritten, args);
                if (!soften.is_too_high || is_first) continue;
                // others lie where its scores were: make them again
                const scoring once = {soften.steps, keys + s->from * lanes, queries + r * lanes, again};
                store_f32(totals + r, before);
                OVER(stage)(&once, &(softening){0}, &(weighing){0}, &unwritten, args);
                write_tiles(&unwritten);
                FINISH(again);
                RAISE(again);
                soften.scores = again;
                OVER(stage)(&(scoring){0}, &soften, &(weighing){0}, &unwritten, args);
#undef FINISH
#undef RAISE
            }
        }
    }
    write_tiles(&unwritten);
    end_attention_tiles(settings);

    for (int64_t g = 0; g < groups; g++) {
        const vf total = load_f32(totals + g * W), share = work->pieces > 1 ? splat(1) : 1.f / total;
        for (int64_t d = 0; d < value_dim; d += W) {
            vf v[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) v[i] = load_f32(sums + (g * value_dim + d + i) * W) * share;
            transpose(v);
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) store_f32(sums + (g * value_dim + d + i) * W, v[i]);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        const int64_t token = work->queries[r / heads], head = work->kv_head * heads + r % heads;
        const float *own = sums + r / W * W * value_dim + r % W * W;
        if (work->pieces > 1) {  // other pieces of this context are elsewhere
            float *partial = work->partials[token] + (work->piece * args->q_heads + head) * (value_dim + 2);
            for (int64_t d = 0; d < value_dim; d += W) store_f32(partial + d, load_f32(own + d * W));
            partial[value_dim] = maxima[r], partial[value_dim + 1] = totals[r];
            continue;
        }
        T *result = (T *)args->out + (token * args->q_heads + head) * value_dim;
        for (int64_t d = 0; d < value_dim; d += W) STORE(result + d, load_f32(own + d * W));
    }
}
