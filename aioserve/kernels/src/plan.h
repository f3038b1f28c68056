// The work items of one attention call. Knows lengths and positions; knows no numbers.
#pragma once
#include <math.h>
#include <string.h>
#include "memory.h"
#include "vector.h"

// Measured, on Zen 5 with heads of 64:
#define TILE 128          // keys packed at a time: both packed tiles fit the first-level cache
#define SMALL_TILE 2      // units, where a row has few queries: memory keeps busy
#define FAR_BYTES 1024    // of K or V that one line, fetched two tiles ahead, brings along
#define FETCH_TO_SECOND(p) __builtin_prefetch(p, 0, 2)  // to the second-level cache
#define PIECE 512         // keys of one item, where a row has few queries
#define FEW_QUERIES 16    // tokens of a row, up to which its context is cut into pieces
#define ITEM_ROWS 192     // queries times heads of one item, with AMX up to twice as many: a tile is packed once for all
#define MAX_ROWS 6        // of one product in registers
#define DIRECT_ROWS 8     // queries times heads at once, where K and V are read as they lie
#define SHARED_ROWS 24    // queries times heads of rows that read the same piece together
#if W == 16 || defined(__aarch64__)  // 32 registers, else 16
#define MAX_VECTORS 4
#else
#define MAX_VECTORS 2
#endif
#ifdef __AMX_BF16__  // makes short work of products, so that packing counts
#define ITEM_NUMBERS (ITEM_ROWS * 512)
#else
#define ITEM_NUMBERS 0
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
    int64_t window;       // 0: none; w: the last w; -c: those in the same c positions
    float softcap;        // 0: none
    const float *sinks;   // [q_heads] or null
    const int64_t *ends;  // [T], behind what a token sees; null: behind itself
    int64_t unit;         // 16 or 32: SMALL_TILE of them are the keys of a tile of few queries
} attention;

// One row of the step.
typedef struct {
    const int32_t *blocks;
    int64_t first_token, tokens, seq_len, block_size;
    int64_t whole;           // leading pieces of which all of its queries see everything
    const int64_t *queries;  // its packed tokens
} row;

typedef struct {
    const int32_t *blocks;         // of its row, or of rows that read the same
    int64_t kv_head;
    const int64_t *queries;        // packed tokens
    int64_t tokens;                // how many
    int64_t position;              // of the first, if they are of one row; else behind all keys
    int64_t first_key, end_key;    // positions that any of its queries may see
    int64_t start, tile;           // where its first tile begins; keys at a time, up to TILE
    int is_direct;                 // K and V are read as they lie, if their sizes allow it
    int64_t piece, pieces;         // which part of the context of a row this is
    float *const *partials;        // by packed token: where its sums go, if there are several
} item;

// Whether it is some of the queries of a row that has many: such a context is in one piece.
INLINE int is_of_many(const item *work) { return !work->partials; }

typedef struct {
    item *items;    // null: there was no memory for them
    row *rows;
    int64_t count;  // of items
    int64_t size;   // products of all items, about
    int is_cut;     // whether the context of any row is in several pieces
} plan;

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// The first position that the token at `position` sees.
INLINE int64_t first_seen(const attention *args, int64_t position) {
    if (args->window < 0) return position - position % -args->window;
    return args->window ? larger(position + 1 - args->window, 0) : 0;
}

// Behind the last position that a token of the item sees; never less than for those before it.
INLINE int64_t end_seen(const attention *args, const item *work, int64_t token) {
    return args->ends ? args->ends[work->queries[token]] : work->position + token + 1;
}

// Whether this is the first piece of a context of which a token of the item sees anything: there a sink
// counts, once.
INLINE int is_first_piece(const attention *args, const item *work, int64_t token) {
    return work->pieces == 1 ||
           first_seen(args, work->position + token) / PIECE == work->first_key / PIECE;
}

// Addresses, side by side.
#define AT_A_TIME 8
typedef int64_t addresses __attribute__((vector_size(8 * AT_A_TIME)));
#define ADDRESS_INDEXES ((addresses){0, 1, 2, 3, 4, 5, 6, 7})

// Fill in the items of a row of many queries, if `items` is not null. Returns their number.
static int64_t plan_many(const attention *args, const row *own, item *items) {
    int64_t group = args->q_heads / args->kv_heads, count = 0;
    const int64_t rows = smaller(ITEM_NUMBERS / (args->key_dim + args->value_dim), 2 * ITEM_ROWS);
    const int64_t at_once = larger(larger(rows, ITEM_ROWS) / group, 1);
    // the last queries see most: begin with them, so that the threads end together
    for (int64_t block = (own->tokens - 1) / at_once; block >= 0; block--) {
        item work = {.blocks = own->blocks, .queries = own->queries + block * at_once};
        work.tokens = smaller(at_once, own->tokens - block * at_once);
        work.position = own->seq_len - own->tokens + block * at_once;
        work.first_key = first_seen(args, work.position);
        work.end_key = end_seen(args, &work, work.tokens - 1);
        work.start = work.first_key / 32 * 32, work.tile = TILE;  // the same whatever multiplies
        work.is_direct = work.tokens * group <= DIRECT_ROWS;
        work.pieces = 1;
        for (; work.kv_head < args->kv_heads; work.kv_head++, count++)
            if (items) items[count] = work;
    }
    return count;
}

// Whether a piece is the same memory for two rows of as many queries, which all see all of it.
INLINE int is_shared(const row *a, const row *b, int64_t piece) {
    if (a->tokens != b->tokens || piece >= smaller(a->whole, b->whole)) return 0;
    int64_t first = piece * PIECE / a->block_size;
    int64_t end = ((piece + 1) * PIECE - 1) / a->block_size + 1;
    return !memcmp(a->blocks + first, b->blocks + first, (end - first) * sizeof *a->blocks);
}

// The same of rows[r] of few queries. Its context is cut into pieces. What it shares with the row
// before is in an item of that one, but for one in `at_once` rows, which begins a new one. All of
// them read K and V as decodes do, in the same tiles: a draft that is verified has the bits of a decode.
static int64_t plan_few(const attention *args, const row *rows, int64_t r, int64_t end,
                        float *const *partials, item *items) {
    const row *own = rows + r;
    int64_t per_row = own->tokens * (args->q_heads / args->kv_heads), count = 0;
    int64_t at_once = larger(SHARED_ROWS / per_row, 1);
    int64_t position = own->seq_len - own->tokens, begin = first_seen(args, position);
    int64_t pieces = (own->seq_len - 1) / PIECE - begin / PIECE + 1;
    for (int64_t piece = 0; piece < pieces; piece++) {
        int64_t next = r + 1;
        if (r % at_once && is_shared(own - 1, own, piece)) continue;
        while (next < end && next % at_once && is_shared(own, rows + next, piece)) next++;
        int64_t start = (begin / PIECE + piece) * PIECE;
        item work = {.blocks = own->blocks, .queries = own->queries, .position = position};
        work.tokens = (next - r) * own->tokens;
        work.first_key = larger(start, begin);
        work.end_key = smaller(start + PIECE, own->seq_len);
        if (next > r + 1) work.position = work.end_key;
        work.tile = SMALL_TILE * args->unit, work.start = work.first_key / work.tile * work.tile;
        work.is_direct = 1;
        work.piece = piece, work.pieces = pieces, work.partials = partials;
        for (; work.kv_head < args->kv_heads; work.kv_head++, count++)
            if (items) items[count] = work;
    }
    return count;
}

// Rows of many queries first, as they take long; those that read the same side by side: in the
// order of their blocks, the longer one first where these begin alike.
static int compare_rows(const void *left, const void *right) {
    const row *a = left, *b = right;
    if (a->tokens != b->tokens) return a->tokens < b->tokens ? 1 : -1;
    int64_t blocks = smaller(a->whole, b->whole) * PIECE / a->block_size;
    for (int64_t i = 0; i < blocks; i++)
        if (a->blocks[i] != b->blocks[i]) return a->blocks[i] < b->blocks[i] ? -1 : 1;
    if (a->whole != b->whole) return a->whole < b->whole ? 1 : -1;
    return (a->first_token > b->first_token) - (a->first_token < b->first_token);
}

static plan make_plan(const attention *args, const int32_t *block_table, int64_t table_width,
                      const int64_t *query_start_loc, const int64_t *seq_lens, int64_t count) {
    const int64_t total = query_start_loc[count];
    plan work = {.rows = take(count * sizeof(row) + total * (sizeof(int64_t) + sizeof(float *)))};
    if (!work.rows) return work;
    int64_t *queries = (int64_t *)(work.rows + count), sums = 0;
    float **partials = (float **)(queries + total);
    for (int64_t r = 0; r < count; r++) {
        int64_t first = query_start_loc[r], tokens = query_start_loc[r + 1] - first;
        int64_t whole = args->window || tokens > FEW_QUERIES ? 0 : (seq_lens[r] - tokens) / PIECE;
        work.rows[r] = (row){block_table + r * table_width, first, tokens,
                             seq_lens[r], args->block_size, whole};
        work.size += tokens * seq_lens[r] * args->q_heads * args->key_dim;
        // each token has its sums of all pieces and heads together
        if (tokens <= FEW_QUERIES && seq_lens[r] > PIECE)
            sums += tokens * ((seq_lens[r] - 1) / PIECE + 1);
    }
    work.is_cut = sums > 0;
    sums *= args->q_heads * (args->value_dim + 2);
    qsort(work.rows, count, sizeof(row), compare_rows);
    while (count && !work.rows[count - 1].tokens) count--;
    for (int64_t r = 0; r < count; r++) {
        work.rows[r].queries = queries;
        for (int64_t i = 0; i < work.rows[r].tokens; i++) *queries++ = work.rows[r].first_token + i;
    }
    for (int is_filling = 0; is_filling < 2; is_filling++) {
        if (is_filling) work.items = take(work.count * sizeof(item) + sums * sizeof(float));
        if (is_filling && !work.items) return work;
        float *place = (float *)(work.items + work.count);
        work.count = 0;
        for (int64_t r = 0; r < count; r++) {
            const row *own = work.rows + r;
            item *items = is_filling ? work.items + work.count : 0;
            if (own->tokens > FEW_QUERIES) work.count += plan_many(args, own, items);
            else work.count += plan_few(args, work.rows, r, count, partials, items);
            if (!is_filling || own->tokens > FEW_QUERIES || own->seq_len <= PIECE) continue;
            for (int64_t i = 0; i < own->tokens; i++) {
                partials[own->first_token + i] = place;
                place += ((own->seq_len - 1) / PIECE + 1) * args->q_heads * (args->value_dim + 2);
            }
        }
    }
    return work;
}
