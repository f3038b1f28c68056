// Products with a weight that never changes. Included once per element type: T, LOAD, LOAD_PART,
// STORE, DEPTH, NAME. Numbers of two bytes are widened to float32: in registers for few rows, once
// into a buffer for more. Each output is one float32 sum over the inputs in their order, whatever
// the number of rows: no result depends on other rows or on threads.

#ifndef BLOCK
#define BLOCK (W == 16 ? 128 : 288)  // most inputs at a time: of a panel at most 32 KiB, widened as well
#define FEW 36                       // rows, of which each panel is read once
#define PAIR_ROWS 3                  // up to which two panels share them: one alone has few sums
#define MANY 192                     // rows at a time; a multiple of MAX_ROWS
#define MANY_OUTPUTS 512             // at a time, for which the rows are widened once
#define ROWS_AHEAD 4                 // fetched while a row is widened
#define FEW_BLOCK (W == 16 ? 128 : 192)  // most inputs at a time, of few rows
// From a row to the next, of floats: rows of a power of two would share lines of a cache. Constants, as
// there are no registers for the addresses of six rows.
#define MANY_STRIDE (BLOCK + 16)
#define FEW_STRIDE (FEW_BLOCK + 16)
enum { MAKE = 1, TAKE };             // of weights as floats: see `few_tile`
#endif

#define LOAD_WEIGHTS(p, i) (DEPTH == 2 ? LOAD_PART(p, i) : LOAD(p))
#define STEP_BYTES (PANEL * DEPTH * (int64_t)sizeof(T))  // of DEPTH inputs in a panel

const int64_t NAME(panel)[2] = {PANEL, DEPTH};

// sums [panels][rows][PANEL] += n inputs of x times those of neighbouring panels; from 0 if
// `is_first`. Constant rows, panels and use of `wide`, a place for the weights of one panel as floats:
// they are put there (MAKE), taken from there (TAKE), or it is not used (0). Meanwhile a share of what
// comes next is fetched: every `1 / shares` of the bytes that are read here, from `next` on.
INLINE void NAME(few_tile)(int rows, int panels, int use, const float *x, const T *weight,
                           int64_t panel_size, int64_t n, float *wide, const char *next, int shares,
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
    const int64_t next_step = (int)STEP_BYTES / shares, next_line = LINE / shares;
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
                for (int j = 0; j < MAX_VECTORS; j++) {
                    float *const as_float = wide + (k + i) * PANEL + j * W;
                    right[j] = use == TAKE ? load_f32(as_float)
                                           : LOAD_WEIGHTS(weight + p * panel_size + j * W * DEPTH, i);
                    if (use == MAKE) store_f32(as_float, right[j]);
                }
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) {
                    vf left = splat_in_order(x + r * FEW_STRIDE + k + i);
#pragma GCC unroll 4
                    for (int j = 0; j < MAX_VECTORS; j++)
                        own[p][r][j] = add_in_order(left, right[j], own[p][r][j]);
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

static __attribute__((noinline)) void NAME(multiply_few)(int rows, int panels, int use,
                                                         const float *x, const T *weight,
                                                         int64_t panel_size, int64_t n, float *wide,
                                                         const char *next, int shares, int is_first,
                                                         float *sums) {
#define CASE(rows, panels, use)                                                                   \
    case 4 * (2 * rows + panels - 1) + use:                                                       \
        NAME(few_tile)(rows, panels, use, x, weight, panel_size, n, wide, next, shares, is_first, \
                       sums);                                                                     \
        break;
    switch (4 * (2 * rows + panels - 1) + use) {
        CASE(1, 1, 0) CASE(2, 1, 0) CASE(3, 1, 0) CASE(4, 1, 0) CASE(5, 1, 0) CASE(6, 1, 0)
        CASE(1, 2, 0) CASE(2, 2, 0) CASE(3, 2, 0)
#if W == 8
        CASE(3, 1, MAKE) CASE(4, 1, MAKE) CASE(5, 1, MAKE) CASE(6, 1, MAKE)
        CASE(3, 1, TAKE) CASE(4, 1, TAKE) CASE(5, 1, TAKE) CASE(6, 1, TAKE)
#endif
    }
#undef CASE
}

// Inputs of a block, at most `most`, where all have about as many: a short one costs much to begin.
INLINE int64_t NAME(block_size)(int64_t in, int64_t most) {
    return ceil_div(ceil_div(in, ceil_div(in, most)), 16) * 16;
}

INLINE void NAME(widen_rows)(const T *x, int64_t stride, int64_t rows, int64_t n, float *wide,
                             int64_t wide_stride) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t k = 0; k < n; k += W) {
            if (k % (LINE / sizeof(T)) == 0) __builtin_prefetch(x + (r + ROWS_AHEAD) * stride + k);
            store_f32(wide + r * wide_stride + k, LOAD(x + r * stride + k));
        }
}

// Up to FEW rows. What an item's next block will be is fetched during this one.
static int NAME(linear_few)(const linear *layer, const T *x, void *y, int64_t rows) {
    const int64_t in = layer->in, out = layer->out, panels = ceil_div(out, PANEL);
    const int64_t at_once = rows <= PAIR_ROWS ? 2 : 1, items = ceil_div(panels, at_once);
    const int64_t panel_size = in * PANEL;
    const int64_t tiles = ceil_div(rows, MAX_ROWS), size = NAME(block_size)(in, FEW_BLOCK);
    const int64_t x_size = rows * FEW_STRIDE;  // of a block of inputs, one after another
    const T *const weight = layer->weight;
    // 8 lanes: to widen weights takes a tenth of the instructions that a tile is made of
    const int is_widened = W == 8 && sizeof(T) == 2 && tiles > 1;
    int status = DONE;
#pragma omp parallel if (rows * in * out >= PARALLEL_PRODUCTS_FROM)
    {
        const int64_t threads = omp_get_num_threads();
        int64_t firsts[FEW / MAX_ROWS + 2];  // rows of tiles
        for (int64_t tile = 0; tile <= tiles; tile++) firsts[tile] = tile * rows / tiles;
        float sums[FEW * PANEL] __attribute__((aligned(64)));
        float weights[W == 8 ? FEW_BLOCK * PANEL : 1] __attribute__((aligned(64)));
        float *const wide = take(ceil_div(in, size) * x_size * sizeof(float));
        if (!wide) note_shortage(&status);
        for (int64_t start = 0; wide && start < in; start += size)
            NAME(widen_rows)(x + start, in, rows, smaller(size, in - start),
                             wide + start / size * x_size, FEW_STRIDE);
        // dynamic: on a busy machine a thread may be away for milliseconds
#pragma omp for schedule(dynamic) nowait
        for (int64_t item = 0; item < items; item++) {
            if (!wide) continue;
            const int64_t panel = item * at_once, column = panel * PANEL;
            const int count = panels - panel < at_once ? panels - panel : at_once;
            const T *own = weight + panel * panel_size;
            // probably
            const T *after = item + threads < items ? own + threads * at_once * panel_size : own;
            for (int64_t start = 0; start < in; start += size) {
                int64_t n = smaller(size, in - start);
                const char *next = (const char *)(start + n < in ? own + (start + n) * PANEL
                                                                 : after);
                const float *own_x = wide + start / size * x_size;
                const int64_t part = n * PANEL * sizeof(T) / tiles;
                for (int64_t tile = 0; tile < tiles; tile++, next += part) {
                    const int64_t first = firsts[tile], end = firsts[tile + 1];
                    NAME(multiply_few)(end - first, count, !is_widened ? 0 : tile ? TAKE : MAKE,
                                       own_x + first * FEW_STRIDE, own + start * PANEL, panel_size,
                                       n, weights, next, tiles, start == 0, sums + first * PANEL);
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

// sums [rows][PANEL] += x [rows][n] times weights [n][PANEL]; from 0 if `is_first`. If `y` is not
// null, they are then its outputs from `row` on, stored while the sums are in the first-level cache.
// `bytes` bytes from `next` on are fetched meanwhile.
static void NAME(multiply_many)(const linear *layer, const place *at, const float *x,
                                int64_t rows, const float *wide, int64_t n, const char *next,
                                int64_t bytes, int is_first, float *sums, void *y, int64_t row) {
    static const float ones[MAX_ROWS] = {1, 1, 1, 1, 1, 1};
    const int64_t lines = ceil_div(bytes * MAX_ROWS, rows * LINE);
    for (int64_t first = 0; first < rows; first += MAX_ROWS) {
        const int64_t count = smaller(MAX_ROWS, rows - first);
        if (bytes)
            for (int64_t i = 0; i < lines; i++, next += LINE) __builtin_prefetch(next);
        multiply_floats(count, x + first * MANY_STRIDE, MANY_STRIDE, wide, PANEL, n, PANEL,
                        is_first ? 0 : ones, sums + first * PANEL, PANEL);
        for (int64_t r = first; y && r < first + count; r++)
            NAME(store_sums)(layer, sums + r * PANEL, y, row + r, at->column, at->count);
    }
}

static int NAME(linear_many)(const linear *layer, const T *x, void *y, int64_t rows) {
    const int64_t in = layer->in, out = layer->out, panels = count_panels(layer);
    const int64_t size = NAME(block_size)(in, BLOCK);
    const int64_t blocks = ceil_div(rows, MANY);
    const int64_t at_once = ceil_div(ceil_div(rows, blocks), MAX_ROWS) * MAX_ROWS;
    int status = DONE;
#pragma omp parallel if (rows * in * out >= PARALLEL_PRODUCTS_FROM)
    {
        const int64_t threads = omp_get_num_threads();
        const int64_t share = ceil_div(panels * blocks, 4 * threads);
        int64_t groups = ceil_div(panels, smaller(MANY_OUTPUTS / PANEL, share));
        while (blocks * groups % threads && groups < panels) groups++;  // as many items for each
        const int64_t most = ceil_div(panels, groups);
        float weights[BLOCK * PANEL] __attribute__((aligned(64)));
        float *const wide = take((MANY_STRIDE + most * PANEL) * at_once * sizeof(float));
        if (!wide) note_shortage(&status);
#pragma omp for schedule(dynamic) nowait
        for (int64_t item = 0; item < blocks * groups; item++) {
            if (!wide) continue;
            float *const sums = wide + MANY_STRIDE * at_once;
            const int64_t row = item / groups * at_once, n = smaller(at_once, rows - row);
            const int64_t first = item % groups * panels / groups;
            const int64_t end = (item % groups + 1) * panels / groups;
            for (int64_t start = 0; start < in; start += size) {
                const int64_t inputs = smaller(size, in - start);
                NAME(widen_rows)(x + row * in + start, in, n, inputs, wide, MANY_STRIDE);
                for (int64_t panel = first; panel < end; panel++) {
                    const place at = find_panel(layer, panel);
                    const T *next = (const T *)layer->weight + ((panel + 1) * in + start) * PANEL;
                    NAME(widen_panel)(layer, &at, start, inputs, weights);
                    const int is_last = start + inputs == in;
                    float *const own = sums + (panel - first) * at_once * PANEL;
                    NAME(multiply_many)(layer, &at, wide, n, weights, inputs, (const char *)next,
                                        at.part ? 0 : inputs * PANEL * sizeof(T), start == 0, own,
                                        is_last ? y : 0, row);
                    if (is_last)
                        note_maxima((maxima){layer->maxima, rows}, row, n, at.column, at.count, own,
                                    PANEL);
                }
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
