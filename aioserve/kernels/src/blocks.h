// Weights of a few bits, on their way to floats: where a panel lies, its scales, its codes. Products
// of few rows unpack them in registers. Knows no element types.
#pragma once
#include "plan.h"
#include "vector.h"
#include "weight.h"

#define PANEL (MAX_VECTORS * W)
#define BLOCK_ROWS MAX_ROWS  // up to which weights are unpacked in registers

INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One panel of a weight, and its place among the outputs.
typedef struct {
    const block_part *part;  // null: the weight is in no blocks
    const uint8_t *panel;
    int64_t column, count;  // of outputs; `count` of the panel's exist
    int64_t left;           // panels of the same part from here on
} place;

static int64_t count_panels(const linear *layer) {
    if (!layer->num_parts) return ceil_div(layer->out, PANEL);
    int64_t count = 0;
    for (int64_t i = 0; i < layer->num_parts; i++) count += ceil_div(layer->parts[i].out, PANEL);
    return count;
}

static place find_panel(const linear *layer, int64_t panel) {
    place found = {.column = panel * PANEL};
    int64_t out = layer->out, first = 0;
    for (int64_t i = 0; i < layer->num_parts; i++) {
        const block_part *part = layer->parts + i;
        const int64_t panels = ceil_div(part->out, PANEL);
        if (panel < panels) {
            found.part = part;
            found.panel = part->panels + panel * part->panel_bytes;
            found.column = first + panel * PANEL;
            out = first + part->out;
            found.left = panels - panel;
            break;
        }
        panel -= panels, first += part->out;
    }
    found.count = smaller(out - found.column, PANEL);
    return found;
}

// Scales and offsets [PANEL] of a group; returns its codes.
INLINE const uint8_t *read_scales(const block_part *part, const uint8_t *panel, int64_t group,
                                  float *scales, float *offsets) {
    const int64_t kinds = 1 + part->has_offset;
    const int64_t bytes = part->group * PANEL / 8 * part->bits;
    const uint8_t *at;
    if (part->per_super) {
        const int64_t head = 2 * PANEL * kinds, one = PANEL * kinds + bytes;
        const uint8_t *super = panel + group / part->per_super * (head + part->per_super * one);
        at = super + head + group % part->per_super * one;
#pragma GCC unroll 4
        for (int j = 0; j < MAX_VECTORS; j++) {
            const vf scale = signed_bytes(at + j * W) * load_f16((const f16 *)super + j * W);
            store_f32(scales + j * W, scale);
            vf offset = scale * -(float)part->zero;
            if (part->has_offset)
                offset = signed_bytes(at + PANEL + j * W) *
                         load_f16((const f16 *)super + PANEL + j * W);
            store_f32(offsets + j * W, offset);
        }
        return at + PANEL * kinds;
    }
    at = panel + group * (2 * PANEL * kinds + bytes);
#pragma GCC unroll 4
    for (int j = 0; j < MAX_VECTORS; j++) {
        const vf scale = load_f16((const f16 *)at + j * W);
        store_f32(scales + j * W, scale);
        store_f32(offsets + j * W, part->has_offset ? load_f16((const f16 *)at + PANEL + j * W)
                                                    : scale * -(float)part->zero);
    }
    return at + 2 * PANEL * kinds;
}

// PANEL codes as floats, in their order.
INLINE void read_codes(int bits, const uint8_t *codes, vf q[MAX_VECTORS]) {
    if (bits == 8) {
#pragma GCC unroll 4
        for (int j = 0; j < MAX_VECTORS; j++) q[j] = signed_bytes(codes + j * W);
        return;
    }
#pragma GCC unroll 2
    for (int j = 0; j < MAX_VECTORS / 2; j++) {
        const vi both = (vi)widen_bytes(codes + j * W);
        q[j] = to_floats(both & 15);
        q[j + MAX_VECTORS / 2] = to_floats(both >> 4);
    }
}

INLINE void unpack_as(int bits, const block_part *part, const uint8_t *panel, int64_t start,
                      int64_t n, float *wide) {
    float scales[PANEL], offsets[PANEL];
    for (int64_t group = start / part->group; group < (start + n) / part->group; group++) {
        const uint8_t *codes = read_scales(part, panel, group, scales, offsets);
        for (int64_t i = 0; i < part->group; i++, codes += PANEL / 8 * bits, wide += PANEL) {
            vf q[MAX_VECTORS];
            read_codes(bits, codes, q);
#pragma GCC unroll 4
            for (int j = 0; j < MAX_VECTORS; j++)
                store_f32(wide + j * W, multiply_add(q[j], load_f32(scales + j * W),
                                                     load_f32(offsets + j * W)));
        }
    }
}

// Inputs [start, start + n) of a panel as floats [n][PANEL]; both are multiples of a group.
static void unpack_floats(const place *at, int64_t start, int64_t n, float *wide) {
    if (at->part->bits == 4) unpack_as(4, at->part, at->panel, start, n, wide);
    else unpack_as(8, at->part, at->panel, start, n, wide);
}

// sums [panels][rows][PANEL] = x [rows][in] times neighbouring panels of a part. Constant rows,
// panels and bits. A sum goes over the inputs in their order, as those of whole numbers do.
INLINE void block_tile(int rows, int panels, int bits, const float *x, int64_t x_stride,
                       const place *at, int64_t in, float *sums) {
    const block_part *part = at->part;
    vf own[2][MAX_ROWS][MAX_VECTORS];
    float scales[2][PANEL], offsets[2][PANEL];
#pragma GCC unroll 2
    for (int p = 0; p < panels; p++)
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int j = 0; j < MAX_VECTORS; j++) own[p][r][j] = splat(0);
    for (int64_t group = 0; group < in / part->group; group++) {
        const uint8_t *codes[2];
#pragma GCC unroll 2
        for (int p = 0; p < panels; p++)
            codes[p] = read_scales(part, at->panel + p * part->panel_bytes, group, scales[p],
                                   offsets[p]);
        const float *from = x + group * part->group;
        for (int64_t i = 0; i < part->group; i++)
#pragma GCC unroll 2
            for (int p = 0; p < panels; p++) {
                vf right[MAX_VECTORS];
                read_codes(bits, codes[p] + i * (PANEL / 8 * bits), right);
#pragma GCC unroll 4
                for (int j = 0; j < MAX_VECTORS; j++)
                    right[j] = multiply_add(right[j], load_f32(scales[p] + j * W),
                                            load_f32(offsets[p] + j * W));
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) {
                    vf left = splat_bits(from + r * x_stride + i);
#pragma GCC unroll 4
                    for (int j = 0; j < MAX_VECTORS; j++)
                        own[p][r][j] = multiply_add(left, right[j], own[p][r][j]);
                }
            }
    }
#pragma GCC unroll 2
    for (int p = 0; p < panels; p++)
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int j = 0; j < MAX_VECTORS; j++)
                store_f32(sums + (p * rows + r) * PANEL + j * W, own[p][r][j]);
}

static __attribute__((noinline)) void multiply_blocks(int rows, int panels, const float *x,
                                                      int64_t x_stride, const place *at,
                                                      int64_t in, float *sums) {
#define CASE(rows, panels)                                                            \
    case 2 * rows + panels - 1:                                                       \
        if (at->part->bits == 4) block_tile(rows, panels, 4, x, x_stride, at, in, sums); \
        else block_tile(rows, panels, 8, x, x_stride, at, in, sums);                  \
        break;
    switch (2 * rows + panels - 1) {
        CASE(1, 1) CASE(2, 1) CASE(3, 1) CASE(4, 1) CASE(5, 1) CASE(6, 1)
        CASE(1, 2) CASE(2, 2) CASE(3, 2)
    }
#undef CASE
}

// Output `row` of a weight as floats [in]; a step of `depth` inputs lies together.
static void unpack_row(const linear *layer, int64_t row, int64_t depth, float *out) {
    int64_t panel = 0;
    for (int64_t i = 0; i < layer->num_parts && row >= layer->parts[i].out; i++) {
        row -= layer->parts[i].out;
        panel += ceil_div(layer->parts[i].out, PANEL);
    }
    const place at = find_panel(layer, panel + row / PANEL);
    const int64_t half = PANEL * depth / 2;
    float scales[PANEL], offsets[PANEL];
    for (int64_t group = 0; group < layer->in / at.part->group; group++) {
        const uint8_t *codes = read_scales(at.part, at.panel, group, scales, offsets);
        for (int64_t i = 0; i < at.part->group; i++) {
            const int64_t place = row % PANEL * depth + i % depth;
            const uint8_t *step = codes + i / depth * (PANEL * depth / 8 * at.part->bits);
            int code;
            if (at.part->bits == 8) code = (int8_t)step[place];
            else code = place < half ? step[place] & 15 : step[place - half] >> 4;
            *out++ = code * scales[row % PANEL] + offsets[row % PANEL];
        }
    }
}
