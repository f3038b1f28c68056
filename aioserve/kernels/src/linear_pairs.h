// Products with a weight that never changes, bfloat16, by AVX512's dot products of pairs. Sums are
// float32 over the whole row, in one order: no result depends on other rows or on threads.
//
// The weight is laid out in panels of 64 outputs: [out / 64][in / 2][64][2], padded with zeros.
#pragma once
#include "vector.h"
#include "weight.h"

const int64_t panel_bf16[2] = {PANEL, 2};

#define TILE_ROWS 6  // times 4 vectors of outputs: 24 sums in registers, 5 more for the operands
#define BLOCK_NUMBERS (1 << 17)  // of x, that stay in the second-level cache beside a panel

INLINE __m512bh load_pairs(const bf16 *p) {
    __m512bh v;
    memcpy(&v, p, sizeof v);
    return v;
}

// `rows` rows of x against one panel; `count` outputs of it exist. Meanwhile a share of a panel is
// fetched from `next` on: the processor's own guesses end with this one.
INLINE void product_tile(int rows, const bf16 *x, const bf16 *panel, int64_t in, const bf16 *bias,
                         bf16 *y, int64_t out, int64_t count, const char *next, int64_t shares) {
    const int64_t next_step = 4 * PANEL / shares, next_line = LINE / shares;
    __m512 sums[TILE_ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < 4; c++) sums[r][c] = _mm512_setzero_ps();
    for (int64_t k = 0; k < in; k += 2, panel += 2 * PANEL, next += next_step) {
        for (int c = 0; c < 4; c++) __builtin_prefetch(next + c * next_line);
        __m512bh w[4];
        for (int c = 0; c < 4; c++) w[c] = load_pairs(panel + 32 * c);
        for (int r = 0; r < rows; r++) {
            int32_t pair;
            memcpy(&pair, x + r * in + k, sizeof pair);
            __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            for (int c = 0; c < 4; c++) sums[r][c] = _mm512_dpbf16_ps(sums[r][c], both, w[c]);
        }
    }
    for (int c = 0; c < 4; c++) {
        int64_t left = count - 16 * c;
        if (left <= 0) return;
        __mmask16 mask = left >= 16 ? 0xffff : (1 << left) - 1;
        vf add = {0};
        if (bias) {
            bf16 part[16] = {0};
            memcpy(part, bias + 16 * c, 2 * (left < 16 ? left : 16));
            add = load_bf16(part);
        }
        for (int r = 0; r < rows; r++) {
            __m256bh half = _mm512_cvtneps_pbh((__m512)((vf)sums[r][c] + add));
            _mm256_mask_storeu_epi16(y + r * out + 16 * c, mask, (__m256i)half);
        }
    }
}

// y [rows, out] = x [rows, in] . weight^T + bias.
void linear_bf16(const linear *layer, const bf16 *x, bf16 *y, int64_t rows) {
    const int64_t in = layer->in, out = layer->out, panels = ceil_div(out, PANEL);
    int64_t at_once = BLOCK_NUMBERS / in / TILE_ROWS * TILE_ROWS;
    at_once = at_once < TILE_ROWS ? TILE_ROWS : at_once;
    const int64_t items = ceil_div(rows, at_once) * panels;
#pragma omp parallel if (rows * in * out >= PARALLEL_PRODUCTS_FROM)
    {
        const int64_t threads = omp_get_num_threads();
        // dynamic: on a busy machine a thread may be away for milliseconds
#pragma omp for schedule(dynamic) nowait
        for (int64_t item = 0; item < items; item++) {
            const int64_t index = item % panels, row = item / panels * at_once;
            const int64_t end = smaller(row + at_once, rows), column = index * PANEL;
            const int64_t shares = ceil_div(end - row, TILE_ROWS);
            const bf16 *panel = (const bf16 *)layer->weight + column * in;
            const bf16 *bias = layer->bias ? (const bf16 *)layer->bias + column : 0;
            const int64_t count = smaller(out - column, PANEL);
            // probably what this thread takes next
            const char *next = (const char *)(index + threads < panels
                                                  ? panel + threads * PANEL * in : panel);
            for (int64_t tile = 0; tile < shares; tile++) {
                const int64_t first = row + tile * TILE_ROWS;
                const bf16 *from = x + first * in;
                bf16 *to = y + first * out + column;
                const char *share = next + 2 * PANEL * in * tile / shares;
#define CASE(rows)                                                                      \
    case rows:                                                                          \
        product_tile(rows, from, panel, in, bias, to, out, count, share, shares);       \
        break;
                switch (smaller(end - first, TILE_ROWS)) {  // a loop for every number of rows
                    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
                }
#undef CASE
            }
        }
    }
}
