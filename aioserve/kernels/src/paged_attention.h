// One call of attention: its work is cut into items, which threads take. Included by each way to attend to
// an item, and there once per element type: T, NAME; K, ROW, OVER, with OVER(attend_item); UNIT: keys
// that a tile begins with a multiple of.

int OVER(paged_attention)(const T *query, int64_t query_token_stride, int64_t query_head_stride,
                          T *out, const void *key_cache, const void *value_cache,
                          const int32_t *block_table, int64_t table_width,
                          const int64_t *query_start_loc, const int64_t *seq_lens, int64_t rows,
                          int64_t q_heads, int64_t kv_heads, int64_t key_dim, int64_t value_dim,
                          int64_t block_size, float scaling, int64_t window, float softcap,
                          const float *sinks, const int64_t *ends) {
    attention args = {query, query_token_stride, query_head_stride, out,
                      key_cache, value_cache, q_heads, kv_heads, key_dim, value_dim, block_size,
                      scaling, window, softcap, sinks, ends, UNIT};
    plan work = make_plan(&args, block_table, table_width, query_start_loc, seq_lens, rows);
    if (!work.items) {
        free(work.rows);
        return OUT_OF_MEMORY;
    }
#pragma omp parallel if (work.size >= PARALLEL_ATTENTION_FROM)
    {
        const int64_t threads = omp_get_num_threads(), rest = work.count / threads / 32;
        const int64_t chunk = rest < 1 ? 1 : smaller(rest, 8);
        K zeros[ROW(key_dim > value_dim ? key_dim : value_dim)];
        memset(zeros, 0, sizeof zeros);
        OVER(places) places;
        for (int i = 0; i < 3; i++) places.ring[i].work = 0;
        places.now = 0, places.zeros = zeros;
#pragma omp for schedule(dynamic, chunk)
        for (int64_t i = 0; i < work.count; i++) {
            int64_t after = (i + 1) % chunk ? i + 1 : i + 1 + (threads - 1) * chunk;
            OVER(attend_item)(&args, work.items + i, after < work.count ? work.items + after : 0,
                              &places);
        }
        if (work.is_cut)  // else this would be a barrier, and a turn of all threads for each item
#pragma omp for schedule(dynamic, 8)
        for (int64_t i = 0; i < work.count; i++)
            if (work.items[i].pieces > 1 && work.items[i].piece == work.items[i].pieces - 1)
                NAME(combine)(&args, work.items + i);
    }
    free(work.items);
    free(work.rows);
    return DONE;
}
