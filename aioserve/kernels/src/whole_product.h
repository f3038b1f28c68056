// Which way rows of whole numbers are multiplied with weights of a few bits: how many at once, by
// tiles or not, in which memory. Knows no element types.
#pragma once
#include "whole.h"
#ifdef __AMX_INT8__
#include "whole_tiles.h"
#else
#define TILES_FROM INT64_MAX
#endif

typedef struct {
    whole_rows x;
    int64_t at_once;     // rows
    int64_t room_bytes;  // of a thread, for what a panel becomes
    int is_unpacked, is_tiled;
#ifdef __AMX_INT8__
    row_tile *tiles;
#endif
} product;

static product begin_product(const linear *layer, int64_t rows) {
    product all = {.x = allocate_whole(rows, layer->in), .is_tiled = rows >= TILES_FROM};
    all.at_once = ceil_div(rows, ceil_div(rows, MAX_ROWS));
    all.is_unpacked = !all.is_tiled && rows >= UNPACK_FROM;
    for (int64_t i = 0; i < layer->num_parts && all.is_unpacked; i++)
        all.room_bytes = larger(all.room_bytes, unpacked_bytes(layer->parts + i, layer->in));
#ifdef __AMX_INT8__
    if (all.is_tiled) {
        all.at_once = TILED_ROWS;
        all.room_bytes = sizeof(tiled_codes);
        const int64_t width = layer->in / SHARED;  // what rows lack is 0: some numbers take long
        all.tiles = aligned_alloc(64, ceil_div(rows, 16) * width * sizeof(row_tile));
        if (rows % 16) memset(all.tiles + rows / 16 * width, 0, width * sizeof(row_tile));
    }
#endif
    return all;
}

static void end_product(const product *all) {
    free(all->x.values);
#ifdef __AMX_INT8__
    free(all->tiles);
#endif
}

// Once all numbers of a row are rounded.
INLINE void end_row(const product *all, int64_t row) {
#ifdef __AMX_INT8__
    if (all->is_tiled) fill_row_tile(&all->x, row, all->tiles);
#endif
    (void)all, (void)row;
}

// Around what a thread multiplies.
INLINE void begin_thread(const product *all) {
#ifdef __AMX_INT8__
    if (all->is_tiled) begin_tiles();
#endif
    (void)all;
}

INLINE void end_thread(const product *all) {
#ifdef __AMX_INT8__
    if (all->is_tiled) end_tiles();
#endif
    (void)all;
}

// sums [rows][PANEL] of up to `at_once` rows from a multiple of that on, and a panel. They have room
// for whole tiles.
INLINE void multiply_rows(const product *all, int64_t first, int64_t rows, const place *at,
                          uint8_t *room, float *sums) {
#ifdef __AMX_INT8__
    if (all->is_tiled) {
        multiply_tiles(rows, all->tiles + first / 16 * (all->x.in / SHARED), all->x.in, at,
                       (tiled_codes *)room, sums);
        return;
    }
#endif
    multiply_whole(rows, &all->x, first, at, all->is_unpacked ? room : 0, sums);
}
