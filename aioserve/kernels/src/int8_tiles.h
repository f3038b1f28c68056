// Products of rows of 8 bits with quantized weights, straight from their codes. A sum over inputs
// that share their scales is exact; such sums are added in float32, in their order. Knows no
// element types.
#pragma once
#include "blocks.h"
#include "int8_dots.h"
#include "int8_rows.h"

#define CODES_AHEAD 2048   // bytes, fetched before they are needed
#define INT8_TILE_ROWS 3   // of a product in registers, with sums in whole numbers and in floats
#define INT8_INPUTS 256    // at a time for many rows; of codes of 4 bits twice as many
#define INT8_ROWS_AT_ONCE 192

// A panel; of more rows than one tile has with its scales as floats.
typedef struct {
    const block_part *part;
    const uint8_t *own;     // as it is stored
    const uint8_t **codes;  // [groups], those of each group; null: for one tile
    float *scales;          // [groups][PANEL], and as many offsets behind them if there are some
} int8_panel;

INLINE int64_t open_panel_bytes(const block_part *part, int64_t in) {
    return in / part->group * (PANEL * sizeof(float) * (1 + part->has_offset) + sizeof(void *));
}

static int8_panel open_panel(const place *at, int64_t in, void *room) {
    const block_part *part = at->part;
    const int64_t groups = in / part->group, offsets = part->has_offset ? groups * PANEL : 0;
    int8_panel panel = {.part = part, .own = at->panel, .scales = room};
    if (!room) return panel;
    panel.codes = (const uint8_t **)(panel.scales + groups * PANEL + offsets);
    float none[PANEL];
    for (int64_t group = 0; group < groups; group++) {
        float *const to = panel.scales + group * PANEL;
        float *const own_offsets = offsets ? to + offsets : none;
        panel.codes[group] = read_scales(part, at->panel, group, 0, to, own_offsets);
    }
    return panel;
}

// own[r][j] += n inputs of rows, 16 or 32, from `bytes` on, times codes. Constant rows, bits and
// whether the rows are alone: then codes are fetched ahead.
INLINE void add_codes(int rows, int bits, int is_alone, const uint8_t *bytes, int64_t stride,
                      int64_t n, const uint8_t *codes, vi own[MAX_ROWS][MAX_VECTORS]) {
    vi some[MAX_ROWS][MAX_VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < MAX_VECTORS; j++) some[r][j] = begin_sums(bits, own[r][j]);
    for (const uint8_t *end = bytes + n; bytes < end; bytes += 32 / bits, codes += 4 * PANEL)
#pragma GCC unroll 2
        for (int half = 0; half < 8 / bits; half++) {
            weight_bytes w[MAX_VECTORS];
#pragma GCC unroll 4
            for (int j = 0; j < MAX_VECTORS; j++) {
                vi both = (vi)load_f32((const float *)codes + j * W);
                if (is_alone && !half && j * W % 16 == 0)
                    __builtin_prefetch(codes + j * 4 * W + CODES_AHEAD);
                if (bits == 4) both = both >> 4 * half & 0x0f0f0f0f;
                w[j] = take_codes(bits, both);
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const vi x = (vi)splat_bits((const float *)(bytes + r * stride + 4 * half));
#pragma GCC unroll 4
                for (int j = 0; j < MAX_VECTORS; j++)
                    some[r][j] = dot_bytes(bits, some[r][j], w[j], x);
            }
        }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < MAX_VECTORS; j++) own[r][j] = end_sums(bits, own[r][j], some[r][j]);
}

// sums [rows][PANEL] += rows [first, first + rows) times the groups [begin, end) of a panel; from 0
// where `begin` is 0. Constant rows and bits.
INLINE void int8_tile(int rows, int bits, int is_alone, const int8_rows *x, int64_t first,
                      const int8_panel *panel, int64_t begin, int64_t end, float *sums) {
    const block_part *part = panel->part;
    const int64_t size = smaller(part->group, INT8_BLOCK), blocks = x->in / INT8_BLOCK;
    const int64_t apart = is_alone ? PANEL : x->in / part->group * PANEL;
    const vi minus_zero = (vi){0} - (int32_t)(part->zero - CODE_ZERO(bits));
    const uint8_t *bytes = x->bytes + first * x->stride + begin * part->group;
    const int8_share *shares = x->shares + first * blocks + begin * part->group / INT8_BLOCK;
    int half = 0;  // of a block, where groups are so small
    float read[2 * PANEL];
    vf all[MAX_ROWS][MAX_VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < MAX_VECTORS; j++)
            all[r][j] = begin ? load_f32(sums + r * PANEL + j * W) : splat(0);
    for (int64_t group = begin; group < end; group++) {
        const float *scales = is_alone ? read : panel->scales + group * PANEL;
        const uint8_t *codes =
            is_alone ? read_scales(part, panel->own, group, 0, read, read + PANEL)
                     : panel->codes[group];
        for (int64_t k = 0; k < part->group; k += size) {
            vi own[MAX_ROWS][MAX_VECTORS];
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const int8_share *of = shares + r * blocks;
                const int32_t *total = size == 16 ? of->halves + half : &of->sum;
                own[r][0] = (vi)splat_bits((const float *)total) * minus_zero;
#pragma GCC unroll 4
                for (int j = 1; j < MAX_VECTORS; j++) own[r][j] = own[r][0];
            }
            add_codes(rows, bits, is_alone, bytes, x->stride, size, codes, own);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const int8_share *of = shares + r * blocks;
                const vf scale = splat(of->scale);
#pragma GCC unroll 4
                for (int j = 0; j < MAX_VECTORS; j++)
                    all[r][j] = multiply_add(to_floats(own[r][j]) * load_f32(scales + j * W),
                                             scale, all[r][j]);
                if (!part->has_offset) continue;
                const vf total = splat((size == 16 ? of->halves[half] : of->sum) * of->scale);
#pragma GCC unroll 4
                for (int j = 0; j < MAX_VECTORS; j++)
                    all[r][j] = multiply_add(load_f32(scales + apart + j * W), total, all[r][j]);
            }
            bytes += size, codes += size * bits / 8 * PANEL;
            if (size == 16) half = !half, shares += !half;
            else shares++;
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < MAX_VECTORS; j++) store_f32(sums + r * PANEL + j * W, all[r][j]);
}

static __attribute__((noinline)) void multiply_int8(int rows, int is_alone, const int8_rows *x,
                                                    int64_t first, const int8_panel *panel,
                                                    int64_t begin, int64_t end, float *sums) {
#define CASE(rows, bits, is_alone)                                          \
    case 100 * rows + 10 * is_alone + bits:                                 \
        int8_tile(rows, bits, is_alone, x, first, panel, begin, end, sums); \
        break;
    switch (100 * rows + 10 * is_alone + panel->part->bits) {
        CASE(1, 4, 0) CASE(2, 4, 0) CASE(3, 4, 0) CASE(1, 8, 0) CASE(2, 8, 0) CASE(3, 8, 0)
        CASE(1, 4, 1) CASE(2, 4, 1) CASE(3, 4, 1) CASE(1, 8, 1) CASE(2, 8, 1) CASE(3, 8, 1)
    }
#undef CASE
}

// sums [rows][PANEL] of rows [first, first + rows) and a whole panel. Of many rows, INT8_INPUTS at a
// time: their codes stay in the first-level cache meanwhile. What lies at `next` is fetched, as much
// as there is in the panel.
static void multiply_int8_panel(int64_t rows, const int8_rows *x, int64_t first,
                           const int8_panel *panel, const uint8_t *next, float *sums) {
    const block_part *part = panel->part;
    const int64_t groups = x->in / part->group, tiles = ceil_div(rows, INT8_TILE_ROWS);
    if (!panel->scales) {
        multiply_int8(rows, 1, x, first, panel, 0, groups, sums);
        return;
    }
    const int64_t inputs = INT8_INPUTS * (part->bits == 4 ? 2 : 1);
    const int64_t at_once = larger(inputs / part->group, 2) / 2 * 2;
    const int64_t lines = part->panel_bytes / LINE, all = tiles * ceil_div(groups, at_once);
    for (int64_t begin = 0, done = 0; begin < groups; begin += at_once)
        for (int64_t tile = 0; tile < tiles; tile++, done++) {
            const int64_t row = tile * rows / tiles, end = (tile + 1) * rows / tiles;
            for (int64_t line = lines * done / all; line < lines * (done + 1) / all; line++)
                __builtin_prefetch(next + line * LINE);
            multiply_int8(end - row, 0, x, first + row, panel, begin,
                          smaller(begin + at_once, groups), sums + row * PANEL);
        }
}
