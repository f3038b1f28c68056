// Products with a weight of a few bits. Included once per element type of two bytes: T, LOAD, STORE,
// NAME. Rows become whole numbers (see whole.h): no result depends on other rows or on threads.

// Outputs of one row and one panel, of which `count` exist.
INLINE void NAME(store_sums)(const float *sums, const T *bias, T *y, int64_t count) {
    T whole[PANEL], *to = count < PANEL ? whole : y;
    for (int64_t c = 0; c < PANEL; c += W) {
        vf v = load_f32(sums + c);
        STORE(to + c, bias ? v + LOAD(bias + c) : v);
    }
    if (count < PANEL) memcpy(y, whole, count * sizeof(T));
}

static void NAME(linear_blocks)(const linear *layer, const T *x, T *y, int64_t rows) {
    const int64_t in = layer->in, out = layer->out, panels = count_panels(layer);
    const T *const bias = layer->bias;
    const product all = begin_product(layer, rows);
    const int64_t sum_bytes = all.at_once * PANEL * sizeof(float);
#pragma omp parallel if (rows * in * out >= PARALLEL_PRODUCTS_FROM)
    {
        float *sums = aligned_alloc(64, ceil_div(sum_bytes + all.room_bytes, 64) * 64);
        uint8_t *room = (uint8_t *)sums + sum_bytes;
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
            const place at = find_panel(layer, panel);
            if (all.is_unpacked) unpack_codes(&at, in, room);
            for (int64_t first = 0; first < rows; first += all.at_once) {
                const int64_t count = smaller(all.at_once, rows - first);
                multiply_whole(count, &all.x, first, &at, all.is_unpacked ? room : 0, sums);
                for (int64_t r = 0; r < count; r++)
                    NAME(store_sums)(sums + r * PANEL, bias ? bias + at.column : 0,
                                     y + (first + r) * out + at.column, at.count);
            }
        }
        free(sums);
    }
    free(all.x.values);
}
