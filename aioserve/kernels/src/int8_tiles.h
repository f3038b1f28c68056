// Products of rows of 8 bits with quantized weights, straight from their codes. A sum over inputs
// that share their scales is exact; such sums are added in float32, in their order. Knows no
// element types.
#pragma once
#include "blocks.h"
#include "int8_dots.h"
#include "int8_rows.h"

#define CODES_AHEAD 2048   // bytes, fetched before they are needed
#define INT8_TILE_ROWS 3   // of a product in registers, with sums in whole numbers and in floats
#define INT8_INPUTS 288    // at a time for many rows, at most; of codes of 4 bits twice as many
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

// sums[r][j] += the inputs of rows, from `bytes` on, whose codes are in 32 bits of each output. Constant
// rows, bits and whether the rows are alone: then codes are fetched ahead.
INLINE void add_word(int rows, int bits, int is_alone, const uint8_t *bytes, int64_t stride,
                     const uint8_t *codes, vi sums[MAX_ROWS][MAX_VECTORS]) {
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
                sums[r][j] = dot_bytes(bits, sums[r][j], w[j], x);
        }
    }
}

// own[r][j] += n inputs of rows, 16 or 32. The loop is unrolled for rows that are not alone: those
// wait for memory, and were slower.
INLINE void add_codes(int rows, int bits, int is_alone, const uint8_t *bytes, int64_t stride,
                      int n, const uint8_t *codes, vi own[MAX_ROWS][MAX_VECTORS]) {
    vi some[MAX_ROWS][MAX_VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < MAX_VECTORS; j++) some[r][j] = begin_sums(bits, own[r][j]);
    if (is_alone) {
        const uint8_t *end = bytes + n;
        __asm__("" : "+r"(end));  // no constant number of turns
        for (; bytes < end; bytes += 32 / bits, codes += 4 * PANEL)
            add_word(rows, bits, 1, bytes, stride, codes, some);
    } else {
#pragma GCC unroll 8
        for (int i = 0; i < n; i += 32 / bits)
            add_word(rows, bits, 0, bytes + i, stride, codes + i * bits / 8 * PANEL, some);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < MAX_VECTORS; j++) own[r][j] = end_sums(bits, own[r][j], some[r][j]);
}

// Of a part: groups of 16 inputs, of a multiple of 32, or what most files have, 32 with no offsets and
// the codes' zero for which the rows have their `start`.
enum { HALVES, BLOCKS, PLAIN };

INLINE int kind_of(const int8_rows *x, const block_part *part) {
    if (part->group == 16) return HALVES;
    const int is_plain = part->group == INT8_BLOCK && !part->has_offset && part->zero == x->zero;
    return is_plain ? PLAIN : BLOCKS;
}

// sums [rows][PANEL] += rows [first, first + rows) times the groups [begin, end) of a panel; from 0
// where `begin` is 0. Constant rows, bits and kind.
INLINE void int8_tile(int rows, int bits, int is_alone, int kind, const int8_rows *x, int64_t first,
                      const int8_panel *panel, int64_t begin, int64_t end, float *sums) {
    const block_part *part = panel->part;
    const int size = kind == HALVES ? 16 : INT8_BLOCK;
    const int64_t group_size = kind == PLAIN ? INT8_BLOCK : part->group;
    const int64_t blocks = x->in / INT8_BLOCK;
    const int64_t apart = is_alone ? PANEL : x->in / group_size * PANEL;
    const vi minus_zero = (vi){0} - (int32_t)(part->zero - CODE_ZERO(bits));
    const uint8_t *bytes = x->bytes + first * x->stride + begin * group_size;
    const int8_share *shares = x->shares + first * blocks + begin * group_size / INT8_BLOCK;
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
        for (int64_t k = 0; k < group_size; k += size) {
            vi own[MAX_ROWS][MAX_VECTORS];
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const int8_share *of = shares + r * blocks;
                const int32_t *total = size == 16 ? of->halves + half : &of->sum;
                if (kind == PLAIN && !CODE_ZERO(bits))
                    own[r][0] = (vi)splat_bits((const float *)&of->start);
                else
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
                if (kind == PLAIN || !part->has_offset) continue;
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
#define TILE_OF(rows, bits, is_alone, kind) \
    int8_tile(rows, bits, is_alone, kind, x, first, panel, begin, end, sums)
#define CASE(rows, bits, is_alone)                                      \
    case 100 * rows + 10 * is_alone + bits:                             \
        if (kind == HALVES) TILE_OF(rows, bits, is_alone, HALVES);      \
        else if (kind == BLOCKS) TILE_OF(rows, bits, is_alone, BLOCKS); \
        else TILE_OF(rows, bits, is_alone, PLAIN);                      \
        break;
    const int kind = kind_of(x, panel->part);
    switch (100 * rows + 10 * is_alone + panel->part->bits) {
        CASE(1, 4, 0) CASE(2, 4, 0) CASE(3, 4, 0) CASE(1, 8, 0) CASE(2, 8, 0) CASE(3, 8, 0)
        CASE(1, 4, 1) CASE(2, 4, 1) CASE(3, 4, 1) CASE(1, 8, 1) CASE(2, 8, 1) CASE(3, 8, 1)
    }
#undef CASE
#undef TILE_OF
}

// sums [rows][PANEL] of rows [first, first + rows) and a whole panel. Of many rows, INT8_INPUTS at a
// time: their codes stay in the first-level cache meanwhile. What lies at `next` is fetched, as much
// as there is in the panel.
static void multiply_int8_panel(int64_t rows, const int8_rows *x, int64_t first,
                           const int8_panel *panel, const uint8_t *next, float *sums) {
    const block_part *part = panel->part;
    const int64_t groups = x->in / part->group;
    if (!panel->scales) {
        multiply_int8(rows, 1, x, first, panel, 0, groups, sums);
        return;
    }
    const int64_t chunks = ceil_div(x->in, INT8_INPUTS * (part->bits == 4 ? 2 : 1));
    const int64_t at_once = ceil_div(ceil_div(groups, chunks), 2) * 2;
    const int64_t tiles = ceil_div(rows, INT8_TILE_ROWS) * ceil_div(groups, at_once);
    const int64_t share = ceil_div(part->panel_bytes, tiles * LINE) * LINE;
    const uint8_t *const fetch_end = next + part->panel_bytes;
    for (int64_t begin = 0; begin < groups; begin += at_once)
        for (int64_t row = 0, count; row < rows; row += count) {
            const int64_t left = rows - row;
            count = left == 4 ? 2 : smaller(left, INT8_TILE_ROWS);
            for (const uint8_t *end = next + share; next < end && next < fetch_end; next += LINE)
                __builtin_prefetch(next);
            multiply_int8(count, 0, x, first + row, panel, begin, smaller(begin + at_once, groups),
                          sums + row * PANEL);
        }
}
