// Products of rows quantized to 8 bits with a quantized weight. Included once per element type: T,
// LOAD, NAME. No result depends on other rows or on threads.
#include "int8_tiles.h"

// Outputs of the rows [first, first + count) from the sums of a panel.
INLINE void NAME(store_panel)(const linear *layer, const place *at, const float *sums, T *y,
                              int64_t first, int64_t count) {
    if (layer->bias || layer->is_wide || at->count < PANEL) {
        for (int64_t r = 0; r < count; r++)
            NAME(store_sums)(layer, sums + r * PANEL, y, first + r, at->column, at->count);
        return;
    }
    y += first * layer->out + at->column;
    for (int64_t r = 0; r < count; r++, y += layer->out)
        for (int64_t c = 0; c < PANEL; c += W) STORE(y + c, load_f32(sums + r * PANEL + c));
}

static int NAME(linear_int8)(const linear *layer, const T *x, void *y, int64_t rows) {
    const int64_t in = layer->in, out = layer->out, panels = count_panels(layer);
    const int8_rows all = allocate_int8(rows, in, layer->parts[0].zero);
    if (!all.bytes) return OUT_OF_MEMORY;
    int status = DONE;
    const int64_t at_once = ceil_div(rows, ceil_div(rows, INT8_ROWS_AT_ONCE));
    int64_t room_bytes = 0;
    for (int64_t i = 0; i < layer->num_parts && rows > INT8_TILE_ROWS; i++)
        room_bytes = larger(room_bytes, open_panel_bytes(layer->parts + i, in));
#pragma omp parallel if (rows * in * out >= PARALLEL_PRODUCTS_FROM)
    {
        const int64_t bytes = at_once * PANEL * sizeof(float) + room_bytes;
        float *const sums = take_lines(bytes);
        if (!sums) note_shortage(&status);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t k = 0; k < in; k += INT8_BLOCK) {
                float numbers[INT8_BLOCK];
                for (int i = 0; i < INT8_BLOCK; i += W)
                    store_f32(numbers + i, LOAD(x + row * in + k + i));
                quantize_block(&all, row, k, numbers);
            }
        // dynamic: on a busy machine a thread may be away for milliseconds
#pragma omp for schedule(dynamic, 64 / PANEL) nowait
        for (int64_t index = 0; index < panels; index++) {
            if (!sums) continue;
            const place at = find_panel(layer, index);
            const uint8_t *const next = at.panel + omp_get_num_threads() * at.part->panel_bytes;
            const int8_panel panel = open_panel(&at, in, room_bytes ? sums + at_once * PANEL : 0);
            for (int64_t first = 0; first < rows; first += at_once) {
                const int64_t count = smaller(at_once, rows - first);
                multiply_int8_panel(count, &all, first, &panel, next, sums);
                NAME(store_panel)(layer, &at, sums, y, first, count);
                note_maxima((maxima){layer->maxima, rows}, first, count, at.column, at.count, sums,
                            PANEL);
            }
        }
        free(sums);
    }
    free(all.bytes);
    return status;
}
