// Products with a weight that never changes. Included once per element type: T, LOAD, LOAD_PART,
// STORE, DEPTH, NAME. Numbers of two bytes are widened to float32: in registers for few rows, once
// into a buffer for many. Each output is one float32 sum over the inputs in their order, whatever
// the number of rows: no result depends on other rows or on threads.

#ifndef BLOCK
#define BLOCK (W == 16 ? 128 : 256)  // inputs at a time: of a panel 8 to 32 KiB, widened 16 or 32
#define FEW 36                       // rows, up to which weights are widened in registers
#define PAIR_ROWS 3                  // up to which two panels share them: one alone has few sums
#define MANY 192                     // rows at a time; a multiple of MAX_ROWS
#define MANY_OUTPUTS (32 * W)        // at a time, for which the rows are widened once
#endif

#define LOAD_WEIGHTS(p, i) (DEPTH == 2 ? LOAD_PART(p, i) : LOAD(p))
#define STEP_BYTES (PANEL * DEPTH * (int64_t)sizeof(T))  // of DEPTH inputs in a panel

const int64_t NAME(panel)[2] = {PANEL, DEPTH};

// sums [panels][rows][PANEL] += n inputs of x times those of neighbouring panels; from 0 if
// `is_first`. Constant rows and panels. Meanwhile a share of what comes next is fetched: every
// `1 / shares` of the bytes that are read here, from `next` on.
INLINE void NAME(few_tile)(int rows, int panels, const float *x, int64_t x_stride, const T *weight,
                           int64_t panel_size, int64_t n, const char *next, int64_t shares,
                           int is_first, float *sums) {
    vf own[2][MAX_ROWS][MAX_VECTORS];
#pragma GCC unroll 2
    for (int p = 0; p < panels; p++)
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int j = 0; j < MAX_VECTORS; j++)
                own[p][r][j] = is_first ? splat(0)
                                        : load_f32(sums + (p * rows + r) * PANEL + j * W);
    const int64_t next_step = STEP_BYTES / shares, next_line = LINE / shares;
    for (int64_t k = 0; k < n; k += DEPTH, weight += PANEL * DEPTH, next += next_step)
#pragma GCC unroll 2
        for (int p = 0; p < panels; p++) {
#pragma GCC unroll 8
            for (int line = 0; line == 0 || line < STEP_BYTES / LINE; line++)
                __builtin_prefetch(next + p * panel_size * sizeof(T) + line * next_line);
#pragma GCC unroll 2
            for (int i = 0; i < DEPTH; i++) {
                vf right[MAX_VECTORS];
#pragma GCC unroll 4
                for (int j = 0; j < MAX_VECTORS; j++)
                    right[j] = LOAD_WEIGHTS(weight + p * panel_size + j * W * DEPTH, i);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) {
                    vf left = splat_bits(x + r * x_stride + k + i);
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

static __attribute__((noinline)) void NAME(multiply_few)(int rows, int panels, const float *x,
                                                         int64_t x_stride, const T *weight,
                                                         int64_t panel_size, int64_t n,
                                                         const char *next, int64_t shares,
                                                         int is_first, float *sums) {
#define CASE(rows, panels)                                                                      \
    case 2 * rows + panels - 1:                                                                 \
        NAME(few_tile)(rows, panels, x, x_stride, weight, panel_size, n, next, shares, is_first, \
                       sums);                                                                   \
        break;
    switch (2 * rows + panels - 1) {
        CASE(1, 1) CASE(2, 1) CASE(3, 1) CASE(4, 1) CASE(5, 1) CASE(6, 1)
        CASE(1, 2) CASE(2, 2) CASE(3, 2)
    }
#undef CASE
}

INLINE void NAME(widen_rows)(const T *x, int64_t stride, int64_t rows, int64_t n, float *wide,
                             int64_t wide_stride) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t k = 0; k < n; k += W)
            store_f32(wide + r * wide_stride + k, LOAD(x + r * stride + k));
}

// Up to FEW rows. What an item's next block will be is fetched during this one.
static int NAME(linear_few)(const linear *layer, const T *x, void *y, int64_t rows) {
    const int64_t in = layer->in, out = layer->out, panels = ceil_div(out, PANEL);
    const int64_t at_once = rows <= PAIR_ROWS ? 2 : 1, items = ceil_div(panels, at_once);
    const int64_t x_stride = in + 16, panel_size = in * PANEL;
    const int64_t tiles = ceil_div(rows, MAX_ROWS);
    const T *const weight = layer->weight;
    int status = DONE;
#pragma omp parallel if (rows * in * out >= PARALLEL_PRODUCTS_FROM)
    {
        const int64_t threads = omp_get_num_threads();
        float sums[FEW * PANEL] __attribute__((aligned(64)));
        float *const wide = take(rows * x_stride * sizeof(float));
        if (wide) NAME(widen_rows)(x, in, rows, in, wide, x_stride);
        else note_shortage(&status);
        // dynamic: on a busy machine a thread may be away for milliseconds
#pragma omp for schedule(dynamic) nowait
        for (int64_t item = 0; item < items; item++) {
            if (!wide) continue;
            const int64_t panel = item * at_once, column = panel * PANEL;
            const int count = panels - panel < at_once ? panels - panel : at_once;
            const T *own = weight + panel * panel_size;
            // probably
            const T *after = item + threads < items ? own + threads * at_once * panel_size : own;
            for (int64_t start = 0; start < in; start += BLOCK) {
                int64_t n = smaller(BLOCK, in - start);
                const char *next = (const char *)(start + n < in ? own + (start + n) * PANEL
                                                                 : after);
                for (int64_t tile = 0; tile < tiles; tile++) {
                    int64_t first = tile * rows / tiles, end = (tile + 1) * rows / tiles;
                    NAME(multiply_few)(end - first, count, wide + first * x_stride + start,
                                       x_stride, own + start * PANEL, panel_size, n,
                                       next + n * PANEL * sizeof(T) * tile / tiles, tiles,
                                       start == 0, sums + first * PANEL);
                }
            }
            for (int64_t p = 0; p < count; p++) {
                const int64_t first = column + p * PANEL, exist = smaller(out - first, PANEL);
                for (int64_t r = 0; r < rows; r++)
                    NAME(store_sums)(layer, sums + (p * rows + r) * PANEL, y, r, first, exist);
                note_maxima((maxima){layer->maxima, rows}, 0, rows, first, exist,
                            sums + p * rows * PANEL, PANEL);
            }
        }
        free(wide);
    }
    return status;
}

// Inputs [start, start + n) of a panel, as floats [n][PANEL].
static void NAME(widen_panel)(const linear *layer, const place *at, int64_t start, int64_t n,
                              float *wide) {
    if (at->part) {
        unpack_floats(at, start, n, wide);
        return;
    }
    const T *own = (const T *)layer->weight + at->column * layer->in + start * PANEL;
    for (int64_t k = 0; k < n; k += DEPTH)
#pragma GCC unroll 2
        for (int i = 0; i < DEPTH; i++)
#pragma GCC unroll 4
            for (int j = 0; j < MAX_VECTORS; j++)
                store_f32(wide + (k + i) * PANEL + j * W,
                          LOAD_WEIGHTS(own + k * PANEL + j * W * DEPTH, i));
}

// sums [rows][PANEL] += x [rows][n] times weights [n][PANEL]; from 0 if `is_first`. `bytes` bytes
// from `next` on are fetched meanwhile.
static void NAME(multiply_many)(const float *x, int64_t x_stride, int64_t rows, const float *wide,
                                int64_t n, const char *next, int64_t bytes, int is_first,
                                float *sums) {
    static const float ones[MAX_ROWS] = {1, 1, 1, 1, 1, 1};
    const int64_t tiles = ceil_div(rows, MAX_ROWS);
    for (int64_t tile = 0; tile < tiles; tile++) {
        for (int64_t b = bytes * tile / tiles / LINE; b < bytes * (tile + 1) / tiles / LINE; b++)
            __builtin_prefetch(next + b * LINE);
        int64_t first = tile * rows / tiles, end = (tile + 1) * rows / tiles;
        multiply_floats(end - first, x + first * x_stride, x_stride, wide, PANEL, n, PANEL,
                        is_first ? 0 : ones, sums + first * PANEL, PANEL);
    }
}

static int NAME(linear_many)(const linear *layer, const T *x, void *y, int64_t rows) {
    const int64_t in = layer->in, out = layer->out, panels = count_panels(layer);
    const int64_t x_stride = BLOCK + 16;  // rows of a power of two would share lines of a cache
    const int64_t blocks = ceil_div(rows, MANY);
    const int64_t at_once = ceil_div(ceil_div(rows, blocks), MAX_ROWS) * MAX_ROWS;
    int status = DONE;
#pragma omp parallel if (rows * in * out >= PARALLEL_PRODUCTS_FROM)
    {
        const int64_t share = ceil_div(panels * blocks, 4 * omp_get_num_threads());
        const int64_t group = smaller(MANY_OUTPUTS / PANEL, share);
        const int64_t groups = ceil_div(panels, group);
        float weights[BLOCK * PANEL] __attribute__((aligned(64)));
        float *const wide = take((x_stride + group * PANEL) * at_once * sizeof(float));
        if (!wide) note_shortage(&status);
#pragma omp for schedule(dynamic) nowait
        for (int64_t item = 0; item < blocks * groups; item++) {
            if (!wide) continue;
            float *const sums = wide + x_stride * at_once;
            const int64_t row = item / groups * at_once, n = smaller(at_once, rows - row);
            const int64_t first = item % groups * group, end = smaller(first + group, panels);
            for (int64_t start = 0; start < in; start += BLOCK) {
                const int64_t inputs = smaller(BLOCK, in - start);
                NAME(widen_rows)(x + row * in + start, in, n, inputs, wide, x_stride);
                for (int64_t panel = first; panel < end; panel++) {
                    const place at = find_panel(layer, panel);
                    const T *next = (const T *)layer->weight + ((panel + 1) * in + start) * PANEL;
                    NAME(widen_panel)(layer, &at, start, inputs, weights);
                    NAME(multiply_many)(wide, x_stride, n, weights, inputs, (const char *)next,
                                        at.part ? 0 : inputs * PANEL * sizeof(T), start == 0,
                                        sums + (panel - first) * at_once * PANEL);
                }
            }
            for (int64_t panel = first; panel < end; panel++) {
                const place at = find_panel(layer, panel);
                const float *own = sums + (panel - first) * at_once * PANEL;
                for (int64_t r = 0; r < n; r++)
                    NAME(store_sums)(layer, own + r * PANEL, y, row + r, at.column, at.count);
                note_maxima((maxima){layer->maxima, rows}, row, n, at.column, at.count, own, PANEL);
            }
        }
        free(wide);
    }
    return status;
}

// y [rows, out] = x [rows, in] . weight^T + bias; of T, or of float where the layer is wide.
int NAME(linear)(const linear *layer, const T *x, void *y, int64_t rows) {
    if (!rows) return DONE;
    if (layer->is_int8) return NAME(linear_int8)(layer, x, y, rows);
    if (layer->num_parts && sizeof(T) == 2) return NAME(linear_blocks)(layer, x, y, rows);
    if (!layer->num_parts && rows <= FEW) return NAME(linear_few)(layer, x, y, rows);
    return NAME(linear_many)(layer, x, y, rows);
}

#undef LOAD_WEIGHTS
#undef STEP_BYTES
