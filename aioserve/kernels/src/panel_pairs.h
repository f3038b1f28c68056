// Some rows against one panel, by AVX512's dot products of bfloat16 pairs. See linear_pairs.h.
#pragma once

#define BLOCK_NUMBERS (1 << 17)
#define TILE_ROWS 6  // times 4 vectors of outputs: 24 sums in registers, 5 more for the operands

INLINE __m512bh load_pairs(const bf16 *p) {
    __m512bh v;
    memcpy(&v, p, sizeof v);
    return v;
}

// Sums of `rows` rows and a panel to outputs, of which `count` exist.
INLINE void store_rows(int rows, const __m512 sums[TILE_ROWS][4], const bf16 *bias, char *y,
                       int64_t stride, int64_t count, int64_t size) {
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
        for (int r = 0; r < rows; r++)
            store_outputs(y + r * stride + 16 * c * size, mask, (vf)sums[r][c] + add, size);
    }
}

// `rows` rows of x against one panel; `count` outputs of it exist. Meanwhile a share of a panel is
// fetched from `next` on; by the only tile, what comes AHEAD: here, then there.
INLINE void product_tile(int rows, const bf16 *x, const bf16 *panel, int64_t in, const bf16 *bias,
                         char *y, int64_t stride, int64_t count, const char *next, int64_t shares,
                         int64_t size) {
    const int64_t next_step = 4 * PANEL / shares, next_line = LINE / shares;
    __m512 sums[TILE_ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < 4; c++) sums[r][c] = _mm512_setzero_ps();
    const int64_t turn = shares == 1 && in > AHEAD ? in - AHEAD : 0;
    const char *fetch = (const char *)(panel + AHEAD * PANEL);
    for (int64_t k = 0; k < in; k += 2, panel += 2 * PANEL, fetch += next_step) {
        if (k == turn) fetch = next;
        for (int c = 0; c < 4; c++) __builtin_prefetch(fetch + c * next_line);
        __m512bh w[4];
        for (int c = 0; c < 4; c++) w[c] = load_pairs(panel + 32 * c);
        for (int r = 0; r < rows; r++) {
            int32_t pair;
            memcpy(&pair, x + r * in + k, sizeof pair);
            __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            for (int c = 0; c < 4; c++) sums[r][c] = _mm512_dpbf16_ps(sums[r][c], both, w[c]);
        }
    }
    store_rows(rows, sums, bias, y, stride, count, size);
}

INLINE void begin_panels(int64_t rows) { (void)rows; }
INLINE void end_panels(void) {}

static void panel_product(int64_t rows, const bf16 *x, const bf16 *panel, int64_t in,
                          const bf16 *bias, char *y, int64_t stride, int64_t count,
                          const char *next, int64_t size) {
    const int64_t shares = ceil_div(rows, TILE_ROWS);
    for (int64_t tile = 0; tile < shares; tile++) {
        const int64_t first = tile * TILE_ROWS;
        const bf16 *from = x + first * in;
        char *to = y + first * stride;
        const char *share = next + 2 * PANEL * in * tile / shares;
#define CASE(rows)                                                                          \
    case rows:                                                                              \
        product_tile(rows, from, panel, in, bias, to, stride, count, share, shares, size); \
        break;
        switch (smaller(rows - first, TILE_ROWS)) {  // a loop for every number of rows
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
        }
#undef CASE
    }
}
