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

// Sums [16][PANEL] in a buffer to outputs of `rows` rows.
INLINE void store_tile(const float *sums, int columns, int64_t rows, const bf16 *bias, char *y,
                       int64_t stride, int64_t count, int64_t size) {
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
                          load_f32(sums + r * PANEL + 16 * c) + add, size);
    }
}

// Sums [16][PANEL], of whose columns 32 count, to the outputs of 16 rows: a line of bfloat16 at once.
INLINE void store_half(const float *sums, const bf16 *bias, char *y, int64_t stride, int64_t count,
                       int64_t size) {
    if (count < 32 || size != sizeof(bf16)) {
        store_tile(sums, 2, 16, bias, y, stride, count, size);
        return;
    }
    vf low = {0}, high = {0};
    if (bias) low = load_bf16(bias), high = load_bf16(bias + 16);
#pragma GCC unroll 16
    for (int64_t r = 0; r < 16; r++) {
        const vf first = load_f32(sums + r * PANEL) + low;
        const vf second = load_f32(sums + r * PANEL + 16) + high;
        const __m512bh both = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
        memcpy(y + r * stride, &both, sizeof both);
    }
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
                          const char *next, int64_t shares, int64_t size) {
    float sums[16 * PANEL] __attribute__((aligned(64)));
    const int64_t lines = STEP_LINES / shares, turn = shares == 1 && in > AHEAD ? in - AHEAD : 0;
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
    store_tile(sums, 4, rows, bias, y, stride, count, size);
}

// 16 rows and, `apart` rows below, 16 more against half a panel. All loads come before the products, which
// begin as their tiles arrive.
#define TWO_BY_TWO(x, x_stride, apart, panel)                                   \
    do {                                                                        \
        _tile_loadd(4, x, x_stride);                                            \
        _tile_loadd(6, panel, PANEL_LINE);                                      \
        _tile_loadd(7, (const char *)(panel) + 64, PANEL_LINE);                 \
        _tile_loadd(5, (const char *)(x) + (apart) * (x_stride), x_stride);     \
        _tile_dpbf16ps(0, 4, 6);                                                \
        _tile_dpbf16ps(1, 4, 7);                                                \
        _tile_dpbf16ps(2, 5, 6);                                                \
        _tile_dpbf16ps(3, 5, 7);                                                \
    } while (0)

static void two_by_half(int64_t apart, const bf16 *x, const bf16 *panel, int64_t in,
                        const bf16 *bias, char *y, int64_t stride, int64_t count, const char *next,
                        int64_t shares, int64_t size) {
    float sums[2][16 * PANEL] __attribute__((aligned(64)));
    const int64_t lines = STEP_LINES / shares / 2;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    int64_t k = 0;
    for (; k + TILE_IN <= in; k += TILE_IN, next += lines * LINE) {
        for (int64_t line = 0; line < lines; line++) __builtin_prefetch(next + line * LINE);
        TWO_BY_TWO(x + k, 2 * in, apart, panel + k * PANEL);
    }
    if (k < in) {
        tail last;
        fill_tail(&last, x + k, in, apart + 16, panel + k * PANEL, PANEL / 2);
        TWO_BY_TWO(last.rows, 2 * TILE_IN, apart, last.panel);
    }
    _tile_stored(0, sums[0], 4 * PANEL);
    _tile_stored(1, sums[0] + 16, 4 * PANEL);
    _tile_stored(2, sums[1], 4 * PANEL);
    _tile_stored(3, sums[1] + 16, 4 * PANEL);
    store_half(sums[0], bias, y, stride, count, size);
    store_half(sums[1], bias, y + apart * stride, stride, count, size);
}

static void panel_product(int64_t rows, const bf16 *x, const bf16 *panel, int64_t in,
                          const bf16 *bias, char *y, int64_t stride, int64_t count,
                          const char *next, int64_t size) {
    const int64_t pairs = (rows + TILE_ROWS - 17) / TILE_ROWS;  // of tiles
    const int64_t shares = pairs + (rows > pairs * TILE_ROWS), half_bytes = PANEL * in;
    for (int half = 0; half < 2 && 32 * half < count; half++)  // it stays in the cache meanwhile
        for (int64_t pair = 0; pair < pairs; pair++) {
            const int64_t row = pair * TILE_ROWS, apart = smaller(rows - row - 16, 16);
            two_by_half(apart, x + row * in, panel + 64 * half, in, bias ? bias + 32 * half : 0,
                        y + row * stride + 32 * half * size, stride, count - 32 * half,
                        next + half_bytes * half + half_bytes * pair / shares, shares, size);
        }
    if (rows > pairs * TILE_ROWS) {
        const int64_t first = rows < 16 ? 0 : rows - 16;
        tile_by_panel(smaller(rows, 16), x + first * in, panel, in, bias, y + first * stride,
                      stride, count, next, shares, size);
    }
}
// Many rows: a pair of tiles of them against some panels, which stay in the second-level cache, then the
// next pair. So outputs of a row that lie together are written together: one panel after the other for all
// rows, each line of the outputs would be in another page.
// Where it pays, measured on a Xeon of model 167 with shapes of 576 to 2,048 inputs.
#define MANY_TILE_ROWS 128
#define MANY_TILE_INPUTS 1024
#define GROUP_NUMBERS (1 << 18)  // of weights
#define GROUP_PANELS 16

#define NO_FETCH (TILE_ROWS * STEP_LINES)  // shares so small that no line is fetched

typedef struct {
    place places[GROUP_PANELS];
    const bf16 *panels[GROUP_PANELS];
    int64_t count;
} panel_group;

static void group_product(int64_t rows, const bf16 *x, const panel_group *group, int64_t in,
                          const bf16 *bias, char *y, int64_t stride, int64_t size) {
    const int64_t pairs = (rows + TILE_ROWS - 17) / TILE_ROWS, last = rows - 16;
    for (int64_t pair = 0; pair < pairs; pair++) {
        const int64_t row = pair * TILE_ROWS, apart = smaller(rows - row - 16, 16);
        for (int64_t i = 0; i < group->count; i++)
            for (int64_t half = 0; half < PANEL && half < group->places[i].count; half += 32) {
                const int64_t column = group->places[i].column + half;
                two_by_half(apart, x + row * in, group->panels[i] + 2 * half, in,
                            bias ? bias + column : 0, y + row * stride + column * size, stride,
                            group->places[i].count - half, (const char *)group->panels[i], NO_FETCH, size);
            }
    }
    for (int64_t i = 0; rows > pairs * TILE_ROWS && i < group->count; i++) {
        const place *at = group->places + i;
        tile_by_panel(16, x + last * in, group->panels[i], in, bias ? bias + at->column : 0,
                      y + last * stride + at->column * size, stride, at->count,
                      (const char *)group->panels[i], NO_FETCH, size);
    }
}

static int linear_many_rows(const linear *layer, const bf16 *x, char *y, int64_t rows) {
    const int64_t in = layer->in, panels = count_panels(layer);
    const int64_t size = layer->is_wide ? sizeof(float) : sizeof(bf16), stride = layer->out * size;
    const int64_t at_once = larger(BLOCK_NUMBERS / in / TILE_ROWS, 1) * TILE_ROWS;
    const int64_t blocks = ceil_div(rows, at_once);
    int status = DONE;
#pragma omp parallel
    {
        const int64_t most = smaller(larger(GROUP_NUMBERS / (PANEL * in), 1), GROUP_PANELS);
        const int64_t share = ceil_div(panels * blocks, 4 * omp_get_num_threads());
        const int64_t groups = ceil_div(panels, smaller(most, share));
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
                group.panels[i] = room ? own : (const bf16 *)layer->weight + at.column * in;
            }
            group_product(end - row, x + row * in, &group, in, layer->bias, y + row * stride, stride,
                          size);
        }
        end_panels();
        free(room);
    }
    return status;
}
#undef FETCH
#undef FOUR
#undef TWO_BY_TWO
