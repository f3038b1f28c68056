// The work items of one attention call. Knows lengths and positions; knows no numbers.
#pragma once
#include <math.h>
#include <stdlib.h>
#include "vector.h"

// Measured, on Zen 5 with heads of 64:
#define TILE 128          // keys packed at a time: both packed tiles fit the first-level cache
#define SMALL_TILE 64     // to twice as many where a row has few queries: memory keeps busy
#define PIECE 512         // keys of one item, where a row has few queries
#define FEW_QUERIES 16    // tokens of a row, up to which its context is cut into pieces
#define ITEM_ROWS 192     // queries times heads of one item: each tile is packed once for all
#define MAX_ROWS 6        // of one product in registers
#define DIRECT_ROWS 8     // queries times heads, up to which K and V are read as they lie
#if W == 16 || defined(__aarch64__)  // 32 registers, else 16
#define MAX_VECTORS 4
#else
#define MAX_VECTORS 2
#endif
#define NOTHING_SEEN -1e30f  // finite: -inf less -inf would be NaN
#define PARALLEL_ATTENTION_FROM (1 << 18)  // products; fewer take some microseconds

int omp_get_num_threads(void);

typedef struct {
    const void *query;  // [T, q_heads, key_dim], strides in numbers
    int64_t query_token_stride, query_head_stride;
    void *out;                            // [T, q_heads, value_dim]
    const void *key_cache, *value_cache;  // [blocks, kv_heads, block_size, dim]
    int64_t q_heads, kv_heads, key_dim, value_dim, block_size;
    float scaling;
    int64_t window;      // 0: none; w: the last w; -c: those in the same c positions
    float softcap;       // 0: none
    const float *sinks;  // [q_heads] or null
} attention;

typedef struct {
    const int32_t *blocks;         // of its row
    int64_t kv_head;
    int64_t first_token, tokens;   // packed queries
    int64_t position;              // of the first
    int64_t first_key, end_key;    // positions that any of its queries may see
    int64_t tile;                  // keys at a time, up to TILE
    int64_t piece, pieces;         // which part of the context this is
    float *partial;                // where its sums go, if there are several
} item;

typedef struct {
    item *items;  // to be freed; the partial sums lie behind them
    int64_t count;
    int64_t size;  // products of all items, about
} plan;

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// The first position that the token at `position` sees.
INLINE int64_t first_seen(const attention *args, int64_t position) {
    if (args->window < 0) return position - position % -args->window;
    return args->window ? larger(position + 1 - args->window, 0) : 0;
}

// Keys at a time, of `count`. About as many each, as what is next is fetched beside them.
static int64_t tile_of(int64_t count, int64_t tokens) {
    if (tokens > FEW_QUERIES) return TILE;
    int64_t tiles = count < SMALL_TILE ? 1 : count / SMALL_TILE;
    return ((count + tiles - 1) / tiles + 15) / 16 * 16;
}

// Fill in the items of one row, if `items` is not null. Returns their number.
static int64_t plan_row(const attention *args, const int32_t *blocks, int64_t first_token,
                        int64_t tokens, int64_t seq_len, item *items, float **partials) {
    int64_t group = args->q_heads / args->kv_heads, count = 0;
    int64_t at_once = tokens;
    if (tokens > FEW_QUERIES) at_once = ITEM_ROWS / group > 1 ? ITEM_ROWS / group : 1;
    // the last queries see most: begin with them, so that the threads end together
    for (int64_t block = (tokens - 1) / at_once; block >= 0; block--) {
        item work = {.blocks = blocks, .first_token = first_token + block * at_once};
        work.tokens = smaller(at_once, tokens - block * at_once);
        work.position = seq_len - tokens + block * at_once;
        int64_t end = work.position + work.tokens, begin = first_seen(args, work.position);
        int64_t length = tokens > FEW_QUERIES ? end : PIECE, first_piece = begin / length;
        work.pieces = (end - 1) / length - first_piece + 1;
        for (work.kv_head = 0; work.kv_head < args->kv_heads; work.kv_head++)
            for (work.piece = 0; work.piece < work.pieces; work.piece++, count++) {
                if (!items) continue;
                int64_t start = (first_piece + work.piece) * length;
                work.first_key = start > begin ? start : begin;
                work.end_key = smaller(start + length, end);
                work.tile = tile_of(work.end_key - work.first_key / 16 * 16, tokens);
                if (work.pieces > 1) {
                    work.partial = *partials;
                    *partials += work.tokens * group * (args->value_dim + 2);
                }
                items[count] = work;
            }
    }
    return count;
}

static plan make_plan(const attention *args, const int32_t *block_table, int64_t table_width,
                      const int64_t *query_start_loc, const int64_t *seq_lens, int64_t rows) {
    plan work = {0};
    int64_t sums = 0;
    float *partials = 0;
    for (int is_filling = 0; is_filling < 2; is_filling++) {
        if (is_filling) {
            work.items = malloc(work.count * sizeof(item) + sums * sizeof(float));
            partials = (float *)(work.items + work.count);
            work.count = 0;
        }
        for (int has_few = 0; has_few < 2; has_few++)  // large items first
            for (int64_t row = 0; row < rows; row++) {
                int64_t tokens = query_start_loc[row + 1] - query_start_loc[row];
                if (!tokens || has_few != (tokens <= FEW_QUERIES)) continue;
                int64_t added = plan_row(args, block_table + row * table_width,
                                         query_start_loc[row], tokens, seq_lens[row],
                                         is_filling ? work.items + work.count : 0, &partials);
                work.count += added;
                if (is_filling) continue;
                if (has_few)
                    sums += added * tokens * args->q_heads / args->kv_heads * (args->value_dim + 2);
                work.size += tokens * seq_lens[row] * args->q_heads * args->key_dim;
            }
    }
    return work;
}
