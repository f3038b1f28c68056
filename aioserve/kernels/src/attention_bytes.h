// Attention over K and V kept as codes (codes.h) by products of whole numbers, which costs less and
// rounds more than attention.h: a query is rounded to 8 bits, with one scale per token and head, and so
// are weights times the scales of their values, with one scale per TOGETHER keys. Included once per
// element type: T, LOAD, STORE, NAME; K, ROW, OVER.
//
// Sums are exact. Which keys share a scale depends on their positions alone, as the largest weight
// among them does: a token's result depends neither on how its context is cut, but for the rounding
// of floats, nor on the other rows of the step, nor on threads, at all. In bfloat16, where AMX is, rows of
// many queries go the way of attention.h: its tiles take two thirds of the time.

#include "byte_tiles.h"

typedef NAME(rows_int8) OVER(rows);  // as where codes become floats
typedef NAME(places_int8) OVER(places);

// As in attention.h, but that tiles are always packed: bytes take little time.
static void OVER(attend_item)(const attention *args, const item *work, const item *after,
                              OVER(places) *places) {
#ifdef TILES
    if (is_of_many(work)) {
        NAME(attend_item_int8)(args, work, after, places);
        return;
    }
#endif
    const int64_t group = args->q_heads / args->kv_heads, rows = work->tokens * group;
    const int64_t key_dim = args->key_dim, value_dim = args->value_dim;
    const int64_t lanes = lanes_of_key(key_dim), columns = columns_of_value(value_dim);

    float scratch[TILE * lanes + TILE / PER_LANE * columns + (2 + 2 * BYTE_ROWS) * TILE +
                  rows * (columns + lanes + W + 1)] __attribute__((aligned(64)));
    float *keys = scratch, *values = keys + TILE * lanes;
    float *scales = values + TILE / PER_LANE * columns, *scores = scales + 2 * TILE;
    float *weights = scores + BYTE_ROWS * TILE, *out = weights + BYTE_ROWS * TILE;
    float *queries = out + rows * columns, *totals = queries + rows * lanes;  // W parts of each
    float *maxima = totals + rows * W;
    rounded_query rounded[rows];

    for (int64_t r = 0; r < rows; r++) {
        int64_t head = work->kv_head * group + r % group;
        const T *query = (const T *)args->query +
                         work->queries[r / group] * args->query_token_stride +
                         head * args->query_head_stride;
        float numbers[key_dim];
        for (int64_t d = 0; d < key_dim; d += W) store_f32(numbers + d, LOAD(query + d));
        rounded[r] = round_query(numbers, key_dim, queries + r * lanes);
        int has_sink = args->sinks && is_first_piece(args, work, r / group);
        maxima[r] = has_sink ? args->sinks[head] * LOG2E : NOTHING_SEEN;
        store_f32(totals + r * W, (vf){has_sink});
    }
    memset(out, 0, rows * columns * sizeof(float));
    if (rows >= BYTE_ROWS) begin_byte_tiles();

    for (int64_t tile = work->start; tile < work->end_key; tile += work->tile) {
        int64_t begin = work->first_key > tile ? work->first_key - tile : 0;
        int64_t end = smaller(work->end_key - tile, work->tile);
        int64_t last = (end + TOGETHER - 1) / TOGETHER * TOGETHER;
        OVER(rows) *own = places->ring + places->now;
        OVER(rows) *next = places->ring + (places->now + 1) % 3;
        OVER(rows) *far = places->ring + (places->now + 2) % 3;
        places->now = (places->now + 1) % 3;
        if (NAME(foresee_int8)(args, work, tile, after, 0, places->zeros, own))
            NAME(prefetch_all_int8)(own, 0, key_dim, value_dim);
        NAME(foresee_int8)(args, work, tile, after, 1, places->zeros, next);
        NAME(prefetch_all_int8)(next, last, key_dim, value_dim);  // no key here to be fetched beside
        NAME(foresee_int8)(args, work, tile, after, 2, places->zeros, far);
        if (work->is_direct) NAME(prefetch_far_int8)(far->keys, far->work->tile, key_dim);
        pack_key_codes(own->keys, next->keys, last, key_dim, keys);
        if (work->is_direct) NAME(prefetch_far_int8)(far->values, far->work->tile, value_dim);
        pack_value_codes(own->values, next->values, last, value_dim, values);
        for (int64_t i = 0; i < last; i++) {
            scales[i] = scale_of(own->keys[i], key_dim);
            scales[TILE + i] = scale_of(own->values[i], value_dim);
        }

        for (int64_t r = 0, mr; r < rows; r += mr) {
            mr = rows_at_once(rows - r);
            // columns that the first of these queries may still see, and the last may already
            int64_t from = larger(begin, first_seen(args, work->position + r / group) - tile);
            int64_t to = smaller(end, end_seen(args, work, (r + mr - 1) / group) - tile);
            if (from >= to) continue;
            from = from / TOGETHER * TOGETHER;
            to = (to + TOGETHER - 1) / TOGETHER * TOGETHER;
            score_rows_at_once(mr, queries + r * lanes, lanes, keys + from, to - from,
                               scores + from);
            float shares[BYTE_ROWS][TILE / TOGETHER];
            for (int i = 0; i < mr; i++) {
                int64_t token = (r + i) / group;
                int64_t start = larger(begin, first_seen(args, work->position + token) - tile);
                int64_t stop = smaller(end, end_seen(args, work, token) - tile);
                float scale = soften_codes(args, scales, rounded[r + i], scores + i * TILE,
                                           weights + i * (TILE / PER_LANE), from, to, start, stop,
                                           shares[i], &maxima[r + i], totals + (r + i) * W);
                float *sums = out + (r + i) * columns;
                if (scale != 1)
                    for (int64_t d = 0; d < columns; d += W)
                        store_f32(sums + d, load_f32(sums + d) * scale);
            }
            weigh_rows_at_once(mr, weights + from / PER_LANE, values + from / PER_LANE * columns,
                               columns, to - from, shares, out + r * columns);
        }
    }

    if (rows >= BYTE_ROWS) end_byte_tiles();
    for (int64_t r = 0; r < rows; r++) {
        float ordered[columns], total = sum(load_f32(totals + r * W));
        int64_t token = work->queries[r / group], head = work->kv_head * group + r % group;
        order_columns(out + r * columns, value_dim, ordered);
        if (work->pieces > 1) {  // other pieces of this context are elsewhere
            int64_t place = work->piece * args->q_heads + head;
            float *sums = work->partials[token] + place * (value_dim + 2);
            memcpy(sums, ordered, value_dim * sizeof(float));
            sums[value_dim] = maxima[r], sums[value_dim + 1] = total;
            continue;
        }
        T *result = (T *)args->out + (token * args->q_heads + head) * value_dim;
        for (int64_t d = 0; d < value_dim; d += W)
            STORE(result + d, load_f32(ordered + d) * (1.f / total));
    }
}

#include "paged_attention.h"
