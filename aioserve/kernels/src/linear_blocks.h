// Products with a weight of a few bits. Included once per element type of two bytes: T, LOAD, STORE,
// NAME. Rows become whole numbers of 16 bits, or of 12 (see whole.h): no result depends on other
// rows or on threads.

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
    const int64_t tiles = ceil_div(rows, MAX_ROWS);
    const T *const bias = layer->bias;
    const whole_rows whole = allocate_whole(rows, in);
    int64_t bytes = 0;
    for (int64_t i = 0; i < layer->num_parts && rows >= UNPACK_FROM; i++)
        bytes = larger(bytes, unpacked_bytes(layer->parts + i, in));
#pragma omp parallel if (rows * in * out >= PARALLEL_PRODUCTS_FROM)
    {
        float sums[MAX_ROWS * PANEL] __attribute__((aligned(64))), numbers[SHARED];
        uint8_t *unpacked = bytes ? aligned_alloc(64, bytes) : 0;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t k = 0; k < in; k += SHARED) {
                for (int i = 0; i < SHARED; i += W)
                    store_f32(numbers + i, LOAD(x + row * in + k + i));
                round_to_whole(&whole, row, k, numbers);
            }
        // dynamic: on a busy machine a thread may be away for milliseconds
#pragma omp for schedule(dynamic, 64 / PANEL) nowait
        for (int64_t panel = 0; panel < panels; panel++) {
            const place at = find_panel(layer, panel);
            if (unpacked) unpack_codes(&at, in, unpacked);
            for (int64_t tile = 0; tile < tiles; tile++) {
                const int64_t first = tile * rows / tiles, end = (tile + 1) * rows / tiles;
                multiply_whole(end - first, &whole, first, &at, unpacked, sums);
                for (int64_t row = first; row < end; row++)
                    NAME(store_sums)(sums + (row - first) * PANEL, bias ? bias + at.column : 0,
                                     y + row * out + at.column, at.count);
            }
        }
        free(unpacked);
    }
    free(whole.values);
}
