// Rows against panels, by AMX: tiles of 16 rows of 64 bytes. See linear_pairs.h.
//
// A panel has 4 tiles side by side, each of 32 inputs (16 lines of pairs) and 16 outputs. Rows that
// are no multiple of 16 end with a tile that overlaps the one before: the same sums made twice.
#pragma once
#include "tile_config.h"

#define TILE_ROWS 32            // two tiles: one of weights is loaded for both
#define BLOCK_NUMBERS (1 << 19)
#define TILE_IN 32              // inputs of a tile
#define PANEL_LINE (4 * PANEL)  // bytes of a pair of inputs in a panel
#define HALF (PANEL / 2)        // outputs of a product by two tiles of rows
#define STEP_LINES (TILE_IN / 2 * PANEL_LINE / LINE)  // to be fetched in a step

// Sums are tiles 0 to 3, rows 4 (and 5), weights (5,) 6 and 7.
INLINE void begin_panels(int64_t rows) {
    tile_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = 16;
    if (rows < 16)
        for (int i = 0; i < 5; i++) config.rows[i] = rows;
    IS_WRITTEN(&config);
    _tile_loadconfig(&config);
}

INLINE void end_panels(void) { _tile_release(); }

// The last 16 inputs of rows and of a panel, or of its right half, with zeros behind them.
typedef struct {
    bf16 rows[TILE_ROWS][TILE_IN], panel[TILE_IN / 2][PANEL][2];
} tail;

INLINE void fill_tail(tail *last, const bf16 *x, int64_t x_stride, int64_t rows,
                      const bf16 *panel, int64_t outputs) {
    memset(last, 0, sizeof *last);
    for (int64_t r = 0; r < rows; r++) memcpy(last->rows[r], x + r * x_stride, 32);
    memcpy(last->panel, panel, 7 * PANEL_LINE + 4 * outputs);  // no line of the weight follows
    IS_WRITTEN(last);
}

// Sums [16][width] in a buffer to outputs of `rows` rows.
INLINE void store_tile(const float *sums, int columns, int64_t rows, int64_t width, const bf16 *bias,
                       char *y, int64_t stride, int64_t count, int64_t size) {
    for (int c = 0; c < columns && 16 * c < count; c++) {
        const int64_t left = count - 16 * c;
        const __mmask16 mask = left >= 16 ? 0xffff : (1 << left) - 1;
        vf add = {0};
        if (bias) {
            bf16 part[16] = {0};
            memcpy(part, bias + 16 * c, 2 * (left < 16 ? left : 16));
            add = load_bf16(part);
        }
        for (int64_t r = 0; r < rows; r++)
            store_outputs(y + r * stride + 16 * c * size, mask,
                          load_f32(sums + r * width + 16 * c) + add, size);
    }
}

// Sums of two tiles of rows and half a panel, of which a row of each is written in every step of the
// product after it: while products wait for weights, and without more stores at once than a cache takes.
typedef struct {
    const float *sums;  // [2][16][HALF]
    int64_t row;        // the next; 16: none is left
    char *first, *second;
    int64_t stride;
    vf low, high;  // of the bias
} unwritten;

INLINE void write_row(unwritten *last) {
    const float *sums = last->sums + last->row++ * HALF;
#pragma GCC unroll 2
    for (int tile = 0; tile < 2; tile++, sums += 16 * HALF) {
        char **const to = tile ? &last->second : &last->first;
        const vf low = load_f32(sums) + last->low, high = load_f32(sums + 16) + last->high;
        const __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
        memcpy(*to, &both, sizeof both);
        *to += last->stride;
    }
}

INLINE void write_rows(unwritten *last) {
    while (last->row < 16) write_row(last);
}

// Sums [2][16][HALF] to outputs of rows 0 to 15 and, `apart` rows below, 16 more: lines of bfloat16 later.
INLINE void write_half(const float *sums, int64_t apart, const bf16 *bias, char *y, int64_t stride,
                       int64_t count, int64_t size, unwritten *last) {
    if (count < HALF || size != sizeof(bf16)) {
        store_tile(sums, 2, 16, HALF, bias, y, stride, count, size);
        store_tile(sums + 16 * HALF, 2, 16, HALF, bias, y + apart * stride, stride, count, size);
        return;
    }
    *last = (unwritten){.sums = sums, .first = y, .second = y + apart * stride, .stride = stride};
    if (bias) last->low = load_bf16(bias), last->high = load_bf16(bias + 16);
}

// Up to 16 rows, as `begin_panels` was told, against the whole panel. Lines are fetched between
// loads: more at once than the processor can wait for would hold these up.
#define FETCH(part)                               \
    for (int64_t i = part; i < lines; i += 4) __builtin_prefetch(fetch + i * LINE)
#define FOUR(x, x_stride, panel)                                \
    do {                                                        \
        _tile_loadd(4, x, x_stride);                            \
        FETCH(0);                                               \
        _tile_loadd(5, panel, PANEL_LINE);                      \
        FETCH(1);                                               \
        _tile_loadd(6, (const char *)(panel) + 64, PANEL_LINE); \
        FETCH(2);                                               \
        _tile_loadd(7, (const char *)(panel) + 128, PANEL_LINE); \
        FETCH(3);                                               \
        _tile_dpbf16ps(0, 4, 5);                                \
        _tile_loadd(5, (const char *)(panel) + 192, PANEL_LINE); \
        _tile_dpbf16ps(1, 4, 6);                                \
        _tile_dpbf16ps(2, 4, 7);                                \
        _tile_dpbf16ps(3, 4, 5);                                \
    } while (0)

static void tile_by_panel(int64_t rows, const bf16 *x, const bf16 *panel, int64_t in,
                          const bf16 *bias, char *y, int64_t stride, int64_t count,
                          const char *next, int64_t lines, int64_t size) {
    float sums[16 * PANEL] __attribute__((aligned(64)));
    const int64_t turn = in > AHEAD ? in - AHEAD : 0;
    const char *fetch = (const char *)(panel + AHEAD * PANEL);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    int64_t k = 0;
    for (; k + TILE_IN <= in; k += TILE_IN, fetch += lines * LINE) {
        if (k == turn) fetch = next;
        FOUR(x + k, 2 * in, panel + k * PANEL);
    }
    if (k < in) {
        tail last;
        fetch = next;
        fill_tail(&last, x + k, in, rows, panel + k * PANEL, PANEL);
        FOUR(last.rows, 2 * TILE_IN, last.panel);
    }
    _tile_stored(0, sums, 4 * PANEL);
    _tile_stored(1, sums + 16, 4 * PANEL);
    _tile_stored(2, sums + 32, 4 * PANEL);
    _tile_stored(3, sums + 48, 4 * PANEL);
    store_tile(sums, 4, rows, PANEL, bias, y, stride, count, size);
}

// 16 rows and, `apart` rows below, 16 more against half a panel. All loads come before the products, which
// begin as their tiles arrive. The weights are asked to stay out of the first-level cache: there rows lie.
#define TWO_BY_TWO(x, x_stride, apart, panel)                                   \
    do {                                                                        \
        _tile_loadd(4, x, x_stride);                                            \
        _tile_stream_loadd(6, panel, PANEL_LINE);                               \
        _tile_stream_loadd(7, (const char *)(panel) + 64, PANEL_LINE);          \
        _tile_loadd(5, (const char *)(x) + (apart) * (x_stride), x_stride);     \
        _tile_dpbf16ps(0, 4, 6);                                                \
        _tile_dpbf16ps(1, 4, 7);                                                \
        _tile_dpbf16ps(2, 5, 6);                                                \
        _tile_dpbf16ps(3, 5, 7);                                                \
    } while (0)

// Weights to be fetched into the second-level cache meanwhile, some lines of them in a step of a product.
typedef struct {
    const char *next, *end;
    int64_t lines;
} fetching;

// Sums [2][16][HALF] of inputs [start, end), added to those before them.
static void two_by_half(int64_t apart, const bf16 *x, const bf16 *panel, int64_t in, int64_t start,
                        int64_t end, float *sums, fetching *ahead, unwritten *last) {
    if (start) {
        _tile_loadd(0, sums, 4 * HALF);
        _tile_loadd(1, sums + 16, 4 * HALF);
        _tile_loadd(2, sums + 16 * HALF, 4 * HALF);
        _tile_loadd(3, sums + 16 * HALF + 16, 4 * HALF);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    int64_t k = start;
    for (; k + TILE_IN <= end; k += TILE_IN) {
        for (int64_t line = 0; line < ahead->lines; line++, ahead->next += LINE)
            __builtin_prefetch(ahead->next, 0, 2);
        TWO_BY_TWO(x + k, 2 * in, apart, panel + k * PANEL);
        if (last->row < 16) write_row(last);
    }
    if (k < end) {
        tail rest;
        fill_tail(&rest, x + k, in, apart + 16, panel + k * PANEL, HALF);
        TWO_BY_TWO(rest.rows, 2 * TILE_IN, apart, rest.panel);
    }
    write_rows(last);  // before others are where its sums are
    _tile_stored(0, sums, 4 * HALF);
    _tile_stored(1, sums + 16, 4 * HALF);
    _tile_stored(2, sums + 16 * HALF, 4 * HALF);
    _tile_stored(3, sums + 16 * HALF + 16, 4 * HALF);
}

// Up to 16 rows.
static void panel_product(int64_t rows, const bf16 *x, const bf16 *panel, int64_t in,
                          const bf16 *bias, char *y, int64_t stride, int64_t count,
                          const char *next, int64_t size) {
    tile_by_panel(rows, x, panel, in, bias, y, stride, count, next, STEP_LINES, size);
}

// More rows: two tiles of them against a group of panels, which stay in the second-level cache, then the next
// two. With many rows there are some panels in a group, so that outputs of a row that lie together are written
// together: one panel after the other for all rows, each line of the outputs would be in another page.
// Rows of many inputs are multiplied a block of inputs at a time, so that two tiles of rows stay in the
// first-level cache; their sums with the group wait in memory, exactly.
// Measured on a Xeon of model 167 with shapes of 576 to 1,536 inputs.
#define MANY_ROWS 512            // from which on panels are in groups
#define GROUP_NUMBERS (1 << 18)  // of weights: in the cache, the next group is beside them
#define GROUP_PANELS 16
#define WHOLE_INPUTS 768  // in one block
#define BLOCK_INPUTS 512
#define BLOCK_PANELS (GROUP_NUMBERS / PANEL / WHOLE_INPUTS)

typedef struct {
    place places[GROUP_PANELS];
    const bf16 *panels[GROUP_PANELS];
    int64_t count;
} panel_group;

static void group_product(int64_t rows, const bf16 *x, const panel_group *group, int64_t in,
                          const bf16 *bias, char *y, int64_t stride, fetching ahead, int64_t size,
                          maxima most) {
    const int64_t pairs = (rows + TILE_ROWS - 17) / TILE_ROWS, final = rows - 16;
    const int64_t steps = ceil_div(in, TILE_IN);
    const int64_t blocks = in > WHOLE_INPUTS ? ceil_div(in, BLOCK_INPUTS) : 1;
    float sums[2 * BLOCK_PANELS][2 * 16 * HALF] __attribute__((aligned(64)));
    unwritten last = {.row = 16};
    ahead.lines = pairs ? ceil_div(STEP_LINES / 2, pairs) : 0;  // none: 16 rows, as blocks are even
    for (int64_t pair = 0; pair < pairs; pair++) {
        const int64_t row = pair * TILE_ROWS, apart = smaller(rows - row - 16, 16);
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t start = block * steps / blocks * TILE_IN;
            const int64_t end = smaller((block + 1) * steps / blocks * TILE_IN, in);
            for (int64_t half = 0; half < 2 * group->count; half++) {
                const place *at = group->places + half / 2;
                const int64_t skipped = half % 2 * HALF, column = at->column + skipped;
                float *const own = sums[blocks > 1 ? half : 0];
                if (at->count <= skipped) continue;
                if (ahead.next >= ahead.end) ahead.lines = 0;
                two_by_half(apart, x + row * in, group->panels[half / 2] + 2 * skipped, in, start, end,
                            own, &ahead, &last);
                if (end < in) continue;
                const int64_t count = smaller(at->count - skipped, HALF);
                write_half(own, apart, bias ? bias + column : 0, y + row * stride + column * size,
                           stride, count, size, &last);
                note_maxima(most, row, 16, column, count, own, HALF);
                note_maxima(most, row + apart, 16, column, count, own + 16 * HALF, HALF);
            }
        }
    }
    write_rows(&last);
    for (int64_t i = 0; rows > pairs * TILE_ROWS && i < group->count; i++) {
        const place *at = group->places + i;
        tile_by_panel(16, x + final * in, group->panels[i], in, bias ? bias + at->column : 0,
                      y + final * stride + at->column * size, stride, at->count, 0, 0, size);
        note_maxima(most, final, 16, at->column, at->count,
                    (const float *)(y + final * stride) + at->column, stride / sizeof(float));
    }
}

static int linear_more_rows(const linear *layer, const bf16 *x, char *y, int64_t rows) {
    const int64_t in = layer->in, panels = count_panels(layer);
    const int64_t size = layer->is_wide ? sizeof(float) : sizeof(bf16), stride = layer->out * size;
    const int64_t at_once = larger(BLOCK_NUMBERS / in / TILE_ROWS, 1) * TILE_ROWS;
    const int64_t least = ceil_div(rows, at_once);
    const bf16 *const weight = layer->weight;
    int status = DONE;
#pragma omp parallel if (rows * in * layer->out >= PARALLEL_PRODUCTS_FROM)
    {
        const int64_t threads = omp_get_num_threads(), even = ceil_div(least, threads) * threads;
        const int64_t blocks = 3 * even <= 4 * least ? even : least;  // as many for each thread
        const int64_t most = smaller(larger(GROUP_NUMBERS / (PANEL * in), 1), GROUP_PANELS);
        const int64_t share = ceil_div(panels * blocks, 4 * threads);
        const int64_t groups = ceil_div(panels, rows < MANY_ROWS ? 1 : smaller(most, share));
        bf16 *const room = layer->num_parts ? take_lines(2 * PANEL * in * ceil_div(panels, groups)) : 0;
        const int is_short = layer->num_parts && !room;
        if (is_short) note_shortage(&status);
        begin_panels(16);
        // dynamic: on a busy machine a thread may be away for milliseconds
#pragma omp for schedule(dynamic) nowait
        for (int64_t item = 0; item < blocks * groups; item++) {
            if (is_short) continue;
            const int64_t index = item % groups, block = item / groups;
            const int64_t row = block * rows / blocks, end = (block + 1) * rows / blocks;
            const int64_t first = index * panels / groups;
            panel_group group = {.count = (index + 1) * panels / groups - first};
            for (int64_t i = 0; i < group.count; i++) {
                const place at = group.places[i] = find_panel(layer, first + i);
                bf16 *const own = room + i * PANEL * in;
                if (room) unpack_pairs(&at, in, own);
                group.panels[i] = room ? own : weight + at.column * in;
            }
            fetching ahead = {0};
            const int64_t after = index + threads;  // probably what this thread takes next
            if (!room && after < groups) {
                ahead.next = (const char *)(weight + after * panels / groups * PANEL * in);
                ahead.end = (const char *)(weight + (after + 1) * panels / groups * PANEL * in);
            }
            group_product(end - row, x + row * in, &group, in, layer->bias, y + row * stride, stride,
                          ahead, size, (maxima){layer->maxima ? layer->maxima + row : 0, rows});
        }
        end_panels();
        free(room);
    }
    return status;
}
#undef FETCH
#undef FOUR
#undef TWO_BY_TWO
