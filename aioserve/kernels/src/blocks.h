// Quantized weights: where a panel lies, its scales, its codes, and what they are as floats.
// Knows no element types.
#pragma once
#include "plan.h"
#include "vector.h"
#include "weight.h"

#define PANEL (MAX_VECTORS * W)

INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One panel of a weight, and its place among the outputs.
typedef struct {
    const block_part *part;  // null: the weight is in no blocks
    const uint8_t *panel;
    int64_t column, count;  // of outputs; `count` of the panel's exist
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
            break;
        }
        panel -= panels, first += part->out;
    }
    found.count = smaller(out - found.column, PANEL);
    return found;
}

// The largest of every NOTED outputs of a product, NaN where there is one: what chooses among the outputs
// reads few of them then. By rows, which one thread writes: two that wrote to the same lines in turns
// would wait for them.
#define NOTED (2 * W)
typedef struct {
    float *to;     // [out / NOTED, rows], or null: nobody wants them
    int64_t rows;  // of the product
} maxima;

// Of `rows` rows and the outputs [column, column + count), a multiple of NOTED but at the end, which still
// lie in a cache.
static void note_maxima(maxima all, int64_t row, int64_t rows, int64_t column, int64_t count,
                        const float *outputs, int64_t stride) {
    for (; all.to && count > 0; column += NOTED, outputs += NOTED, count -= NOTED) {
        float *const to = all.to + column / NOTED * all.rows + row;
        for (int64_t r = 0; r < rows; r++) {
            const float *own = outputs + r * stride;
            if (count >= NOTED && r + W <= rows) {
                vf each[W];
#pragma GCC unroll 16
                for (int i = 0; i < W; i++) each[i] = high_lanes(own + i * stride, NOTED);
                const vf most = highest_of_each(each);
                if (highest(most) < INFINITY) {
                    store_f32(to + r, most);
                    r += W - 1;
                    continue;
                }
            }
            float room[NOTED];
            for (int i = 0; count < NOTED && i < NOTED; i++) room[i] = i < count ? own[i] : -INFINITY;
            to[r] = largest(count < NOTED ? room : own, NOTED);
        }
    }
}

// Scales and offsets [PANEL] of a group; returns its codes. `zero` may be put into the offsets.
INLINE const uint8_t *read_scales(const block_part *part, const uint8_t *panel, int64_t group,
                                  float zero, float *scales, float *offsets) {
    const int64_t kinds = 1 + part->has_offset, bytes = part->group * PANEL / 8 * part->bits;
    const uint8_t *at, *super = 0;
    if (part->per_super) {
        const int64_t head = 2 * PANEL * kinds, one = PANEL * kinds + bytes;
        super = panel + group / part->per_super * (head + part->per_super * one);
        at = super + head + group % part->per_super * one;
    } else {
        at = panel + group * (2 * PANEL * kinds + bytes);
    }
#pragma GCC unroll 4
    for (int j = 0; j < MAX_VECTORS * W; j += W) {
        vf scale, offset = splat(0);
        if (super) {
            scale = signed_bytes(at + j) * load_f16((const f16 *)super + j);
            if (part->has_offset)
                offset = signed_bytes(at + PANEL + j) * load_f16((const f16 *)super + PANEL + j);
        } else {
            scale = load_f16((const f16 *)at + j);
            if (part->has_offset) offset = load_f16((const f16 *)at + PANEL + j);
        }
        store_f32(scales + j, scale);
        store_f32(offsets + j, multiply_add(scale, splat(-zero), offset));
    }
    return at + (super ? 1 : 2) * PANEL * kinds;
}

// Where the code of input `i` begins in the 32 bits that hold it: see weight.h.
INLINE int code_place(int bits, int i) {
    const int byte = i % 4 / 2 + i % 2 * 2;
    return 8 * byte + (bits == 4 ? i / 4 * 4 : 0);
}

INLINE void unpack_as(int bits, const block_part *part, const uint8_t *panel, int64_t start,
                      int64_t n, float *wide) {
    const int zero = part->zero, mask = (1 << bits) - 1;
    float scales[PANEL], offsets[PANEL];
    for (int64_t group = start / part->group; group * part->group < start + n; group++) {
        const uint8_t *codes = read_scales(part, panel, group, 0, scales, offsets);
        for (int64_t k = 0; k < part->group; k += 32 / bits, codes += 4 * PANEL)
            for (int64_t j = 0; j < PANEL; j += W) {
                const vi own = (vi)load_f32((const float *)codes + j);
#pragma GCC unroll 8
                for (int i = 0; i < 32 / bits; i++) {
                    const vf q = to_floats((own >> code_place(bits, i) & mask) - zero);
                    const int64_t input = group * part->group + k + i - start;
                    if (input >= 0 && input < n)
                        store_f32(wide + input * PANEL + j,
                                  multiply_add(q, load_f32(scales + j), load_f32(offsets + j)));
                }
            }
    }
}

// Inputs [start, start + n) of a panel as floats [n][PANEL].
static void unpack_floats(const place *at, int64_t start, int64_t n, float *wide) {
    if (at->part->bits == 4) unpack_as(4, at->part, at->panel, start, n, wide);
    else unpack_as(8, at->part, at->panel, start, n, wide);
}

// Output `row` of a weight as floats [in].
static void unpack_row(const linear *layer, int64_t row, float *out) {
    int64_t panel = 0;
    for (int64_t i = 0; i < layer->num_parts && row >= layer->parts[i].out; i++) {
        row -= layer->parts[i].out;
        panel += ceil_div(layer->parts[i].out, PANEL);
    }
    const place at = find_panel(layer, panel + row / PANEL);
    const int bits = at.part->bits, zero = at.part->zero;
    float scales[PANEL], offsets[PANEL];
    row %= PANEL;
    for (int64_t group = 0; group < layer->in / at.part->group; group++) {
        const uint8_t *codes = read_scales(at.part, at.panel, group, 0, scales, offsets);
        for (int64_t i = 0; i < at.part->group; i++) {
            uint32_t own;
            memcpy(&own, codes + (i / (32 / bits) * PANEL + row) * sizeof own, sizeof own);
            const int code = own >> code_place(bits, i % (32 / bits)) & ((1 << bits) - 1);
            *out++ = (code - zero) * scales[row] + offsets[row];
        }
    }
}
