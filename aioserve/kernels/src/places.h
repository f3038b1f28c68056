// Where K and V of the next tiles lie, and fetching them ahead. Included as attention.h is: K, ROW,
// OVER.
//
// A processor drops fetches while about ten others are under way (measured on Zen 5), and cannot
// guess where the next block lies. So each line of the next tile is fetched beside a key of this
// one, from the second-level cache: a few lines of the tile after it have brought their neighbours
// there meanwhile.
//
// On a Xeon with AMX, fetches in a burst hold up what follows, even those to the second-level cache
// (measured). So where there are TILES (attention.h), rows of few queries over numbers as they are fetch each
// line of the next tile to there alone, and evenly over all work on this one: also while scores become weights (prefetch_fourths).

// Where K and V of a tile lie.
typedef struct {
    const item *work;  // null: of none
    int64_t tile;      // its first key
    const K *keys[TILE + AT_A_TIME], *values[TILE + AT_A_TIME];
} OVER(rows);

// Of this tile and of what this thread probably takes next and after that.
typedef struct {
    OVER(rows) ring[3];
    int now;
    const K *zeros;
} OVER(places);

// Find the first `count` places of a tile, or more: zeros outside of what the item may see, which
// is never read, as other requests may be writing there.
static void OVER(find_rows)(const attention *args, const item *work, int64_t tile, int64_t count,
                            const K *zeros, OVER(rows) *rows) {
    const int64_t key_bytes = ROW(args->key_dim) * sizeof(K);
    const int64_t value_bytes = ROW(args->value_dim) * sizeof(K);
    const addresses key_steps = ADDRESS_INDEXES * key_bytes;
    const addresses value_steps = ADDRESS_INDEXES * value_bytes;
    const K **keys = rows->keys, **values = rows->values;
    int64_t begin = work->first_key > tile ? work->first_key - tile : 0;
    int64_t end = smaller(work->end_key - tile, work->tile), i = 0;
    rows->work = work, rows->tile = tile;
    while (i < begin) keys[i] = values[i] = zeros, i++;
    while (i < end) {
        int64_t position = tile + i, offset = position % args->block_size;
        int64_t slot = work->blocks[position / args->block_size] * args->kv_heads + work->kv_head;
        slot = slot * args->block_size + offset;
        addresses key = key_steps + ((int64_t)args->key_cache + slot * key_bytes);
        addresses value = value_steps + ((int64_t)args->value_cache + slot * value_bytes);
        int64_t block_end = smaller(end, i + args->block_size - offset);
        for (; i < block_end; i += AT_A_TIME, key += AT_A_TIME * key_bytes) {
            memcpy(keys + i, &key, sizeof key), memcpy(values + i, &value, sizeof value);
            value += AT_A_TIME * value_bytes;
        }
        i = block_end;
    }
    while (i < count) keys[i] = values[i] = zeros, i++;
}

// The same of the tile that is `steps` after this one, unless it is there already: returns whether
// it was not.
INLINE int OVER(foresee)(const attention *args, const item *work, int64_t tile, const item *after,
                         int steps, const K *zeros, OVER(rows) *rows) {
    const int64_t count = work->tile;
    for (; steps; steps--) {
        tile += work->tile;
        if (tile >= work->end_key && after) work = after, after = 0, tile = work->start;
    }
    if (rows->work == work && rows->tile == tile) return 0;
    const int64_t most = (larger(count, work->tile) + 31) / 32 * 32;  // whole tiles of AMX
    OVER(find_rows)(args, work, tile, most, zeros, rows);
    return 1;
}

// The processor cannot guess where the next block lies.
INLINE void OVER(prefetch)(const K *row, int64_t n) {
    for (int64_t i = 0; i < n; i += 64 / sizeof(K)) __builtin_prefetch(row + i);
}

// A line of every FAR_BYTES: it brings its neighbours into the second-level cache.
INLINE void OVER(prefetch_far)(const K *const *rows, int64_t count, int64_t n) {
    const int64_t step = larger(FAR_BYTES / (ROW(n) * (int64_t)sizeof(K)), 1);
    for (int64_t i = step / 2; i < count; i += step) __builtin_prefetch(rows[i]);
}

// The last of every four rows [from, to): share `part` of `parts`.
INLINE void OVER(prefetch_fourths)(const OVER(rows) *next, int64_t from, int64_t to, int part,
                                   int parts, int64_t key_dim, int64_t value_dim) {
    const int64_t fours = (to - from) / 4;
    for (int64_t four = part * fours / parts; four < (part + 1) * fours / parts; four++) {
        const K *key = next->keys[from + 4 * four + 3], *value = next->values[from + 4 * four + 3];
        for (int64_t i = 0; i < key_dim; i += LINE / sizeof(K)) FETCH_TO_SECOND(key + i);
        for (int64_t i = 0; i < value_dim; i += LINE / sizeof(K)) FETCH_TO_SECOND(value + i);
    }
}

INLINE void OVER(prefetch_all)(const OVER(rows) *rows, int64_t first, int64_t key_dim,
                               int64_t value_dim) {
    for (int64_t i = first; i < rows->work->tile; i++) {
        OVER(prefetch)(rows->keys[i], key_dim);
        OVER(prefetch)(rows->values[i], value_dim);
    }
}

// Find this tile and the two after it, and fetch rows of the next one from `first` on. Returns where this
// one lies; `places->now` is the next.
INLINE OVER(rows) *OVER(enter_tile)(const attention *args, const item *work, int64_t tile, int64_t first,
                                    const item *after, OVER(places) *places) {
    OVER(rows) *own = places->ring + places->now;
    OVER(rows) *next = places->ring + (places->now + 1) % 3;
    OVER(rows) *far = places->ring + (places->now + 2) % 3;
    places->now = (places->now + 1) % 3;
    if (OVER(foresee)(args, work, tile, after, 0, places->zeros, own))
        OVER(prefetch_all)(own, 0, args->key_dim, args->value_dim);
    OVER(foresee)(args, work, tile, after, 1, places->zeros, next);
    OVER(prefetch_all)(next, first, args->key_dim, args->value_dim);
    OVER(foresee)(args, work, tile, after, 2, places->zeros, far);
    return own;
}
