// Products with a weight that never changes, bfloat16, by instructions that multiply pairs. Sums are
// float32 over the whole row, in one order: no result depends on other rows or on threads.
//
// The weight is laid out in panels of 64 outputs: [out / 64][in / 2][64][2], padded with zeros.
#pragma once
#include "blocks.h"
#include "vector.h"
#include "weight.h"

const int64_t panel_bf16[2] = {PANEL, 2};

// Both define TILE_ROWS, BLOCK_NUMBERS (of x, that stay in the second-level cache) and, for some rows
// of x [rows, in] and one panel, of which `count` outputs exist, `panel_product`: what lies at `next`
// is fetched meanwhile, as much as there is in a panel. An output takes `size` bytes: 2 as bfloat16,
// 4 as float32; one row of them begins `stride` bytes after the last.
// `begin_panels(rows)` and `end_panels()` stand around the products of a thread.

// Up to 16 outputs.
INLINE void store_outputs(char *to, __mmask16 mask, vf outputs, int64_t size) {
    if (size == sizeof(float)) {
        _mm512_mask_storeu_ps(to, mask, (__m512)outputs);
        return;
    }
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh((__m512)outputs));
}

#define AHEAD 96  // inputs of a panel, fetched before they are needed: 12 KiB. Measured: 64 to 128
#ifdef __AMX_BF16__
#include "block_pairs.h"
#include "panel_tiles.h"
#define linear_codes(layer, x, y, rows) DONE  // all their rows are rounded: see whole.h
#else
#include "panel_pairs.h"
#include "code_pairs.h"
#define unpack_pairs(at, in, to) (void)(to)
#endif

// y [rows, out] = x [rows, in] . weight^T + bias; of bfloat16, or of float where the layer is wide.
int linear_bf16(const linear *layer, const bf16 *x, void *y, int64_t rows) {
    if (!rows) return DONE;
    if (layer->num_parts && rows < ROUNDED_FROM) {  // more are faster as they are, than as bytes, too
        if (layer->is_int8) return linear_int8_bf16(layer, x, y, rows);
        if (rows < KEPT_FROM) return linear_blocks_bf16(layer, x, y, rows);
        return linear_codes(layer, x, y, rows);
    }
#ifdef __AMX_BF16__
    if (rows > 16) return linear_more_rows(layer, x, y, rows);
#endif
    const int64_t in = layer->in, out = layer->out, panels = count_panels(layer);
    const int64_t size = layer->is_wide ? sizeof(float) : sizeof(bf16);
    int64_t at_once = BLOCK_NUMBERS / in / TILE_ROWS * TILE_ROWS;
    at_once = at_once < TILE_ROWS ? TILE_ROWS : at_once;
    const int64_t blocks = ceil_div(rows, at_once), items = blocks * panels;
    int status = DONE;
#pragma omp parallel if (rows * in * out >= PARALLEL_PRODUCTS_FROM)
    {
        const int64_t threads = omp_get_num_threads();
        bf16 *const room = layer->num_parts ? take_lines(2 * PANEL * in) : 0;
        const int is_short = layer->num_parts && !room;
        if (is_short) note_shortage(&status);
        begin_panels(rows / blocks);
        // dynamic: on a busy machine a thread may be away for milliseconds
#pragma omp for schedule(dynamic) nowait
        for (int64_t item = 0; item < items; item++) {
            if (is_short) continue;
            const int64_t index = item % panels, block = item / panels;
            const int64_t row = block * rows / blocks, end = (block + 1) * rows / blocks;
            const place at = find_panel(layer, index);
            const bf16 *bias = layer->bias ? (const bf16 *)layer->bias + at.column : 0;
            const bf16 *panel = room ? room : (const bf16 *)layer->weight + at.column * in;
            // probably what this thread takes next
            const bf16 *next =
                !room && index + threads < panels ? panel + threads * PANEL * in : panel;
            if (room) unpack_pairs(&at, in, room);
            panel_product(end - row, x + row * in, panel, in, bias,
                          (char *)y + (row * out + at.column) * size, out * size, at.count,
                          (const char *)next, size);
            note_maxima((maxima){layer->maxima, rows}, row, end - row, at.column, at.count,
                        (const float *)y + row * out + at.column, out);
        }
        end_panels();
        free(room);
    }
    return status;
}
