// Products with a quantized weight. Included once per element type of two bytes: T, LOAD, STORE,
// NAME. Rows become whole numbers (see whole.h): no result depends on other rows or on threads.

// The outputs [column, column + count) of a row of y [rows, out], from the sums of their panel.
INLINE void NAME(store_sums)(const linear *layer, const float *sums, void *y, int64_t row,
                             int64_t column, int64_t count) {
    const T *const bias = layer->bias ? (const T *)layer->bias + column : 0;
    const int64_t size = layer->is_wide ? sizeof(float) : sizeof(T);
    char *const own = (char *)y + (row * layer->out + column) * size;
    float room[PANEL];
    char *const to = count < PANEL ? (char *)room : own;
    for (int64_t c = 0; c < PANEL; c += W) {
        vf v = load_f32(sums + c);
        if (bias) v += LOAD(bias + c);
        if (layer->is_wide) store_f32((float *)to + c, v);
        else STORE((T *)to + c, v);
    }
    if (count < PANEL) memcpy(own, room, count * size);
}

static int NAME(linear_blocks)(const linear *layer, const T *x, void *y, int64_t rows) {
    const int64_t in = layer->in, out = layer->out, panels = count_panels(layer);
    const product all = begin_product(layer, rows);
    if (!all.x.values) return OUT_OF_MEMORY;
    int status = DONE;
    const int64_t sum_bytes = all.at_once * PANEL * sizeof(float);
#pragma omp parallel if (rows * in * out >= PARALLEL_PRODUCTS_FROM)
    {
        float *const sums = take_lines(sum_bytes + all.room_bytes);
        if (!sums) note_shortage(&status);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            for (int64_t k = 0; k < in; k += SHARED) {
                float numbers[SHARED];
                for (int i = 0; i < SHARED; i += W)
                    store_f32(numbers + i, LOAD(x + row * in + k + i));
                round_to_whole(&all.x, row, k, numbers);
            }
        }
        // dynamic: on a busy machine a thread may be away for milliseconds
#pragma omp for schedule(dynamic, 64 / PANEL) nowait
        for (int64_t panel = 0; panel < panels; panel++) {
            if (!sums) continue;
            uint8_t *const room = (uint8_t *)sums + sum_bytes;
            const place at = find_panel(layer, panel);
            if (all.is_unpacked) unpack_codes(&at, in, room);
            for (int64_t first = 0; first < rows; first += all.at_once) {
                const int64_t count = smaller(all.at_once, rows - first);
                multiply_whole(count, &all.x, first, &at, all.is_unpacked ? room : 0, sums);
                for (int64_t r = 0; r < count; r++)
                    NAME(store_sums)(layer, sums + r * PANEL, y, first + r, at.column, at.count);
                note_maxima((maxima){layer->maxima, rows}, first, count, at.column, at.count, sums,
                            PANEL);
            }
        }
        free(sums);
    }
    free(all.x.values);
    return status;
}
