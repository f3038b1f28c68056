// Products of bfloat16 rows with quantized weights, by dot products of pairs. Rows stay what they
// are, and bfloat16 holds a code less its zero, a whole number of up to 9 bits and a sign, exactly.
// Sums over inputs that share a scale, and of those times their scales, are float32, in one order: no
// result depends on other rows or on threads.
//
// A panel is walked in chunks. The first tile of rows unpacks one in registers, beside its products,
// and leaves it to the others.
#pragma once

#define CHUNK 128  // inputs: 16 KiB of pairs, which stay in the first-level cache

// Some inputs of a panel, in pieces that share scales.
typedef struct {
    bf16 pairs[CHUNK / 2][PANEL][2];      // codes less their zero
    float scales[CHUNK / 16][2 * PANEL];  // of a piece, and its offsets
    int64_t start, end, piece;            // inputs; the last piece may have fewer
} chunk;

// Codes of 4 bits less their zero, twice: so the bit after a code does not matter.
INLINE __m512i code_table(int64_t zero) {
    bf16 codes[W];
    store_bf16(codes, to_floats(INDEXES - (int32_t)zero));
    return _mm512_broadcast_i64x4(_mm256_loadu_si256((const void *)codes));
}

// Pair `q` of those that 32 bits hold, of 16 outputs. Constant bits; with 16 it is there already.
INLINE __m512bh code_pair(int bits, const void *codes, int q, __m512i table, vf zero) {
    const __m512i own = _mm512_loadu_si512(codes);
    const int place = code_place(bits == 4 ? 4 : 8, 2 * q);
    if (bits == 16) return (__m512bh)own;
    if (bits == 4) return (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi32(own, place), table);
    // whole numbers of few bits, so the low half of a float is 0
    const vf low = to_floats((vi)((vu)own >> place & 0xff)) - zero;
    const vf high = to_floats((vi)((vu)own >> (place + 16) & 0xff)) - zero;
    return (__m512bh)((vu)high | (vu)low >> 16);
}

// sums [rows][PANEL] += rows of x times a chunk. Its pairs are there (16 bits), or are made of the
// panel's codes of so many bits, and kept there if `is_kept`. All three are constants. `halves`: sums
// of 16 inputs each of the rows; null where there are no offsets.
INLINE void chunk_tile(int rows, int bits, int is_kept, const bf16 *x, int64_t in,
                       const float *halves, const place *at, chunk *own, float *sums) {
    const block_part *part = at->part;
    const __m512i table = code_table(part->zero);
    const vf zero = splat(part->zero);
    bf16 *pairs = own->pairs[0][0];
    float *scales = own->scales[0];
    for (int64_t k = own->start; k < own->end; scales += 2 * PANEL) {
        const int64_t end = smaller(k + own->piece, own->end);
        const uint8_t *codes = (const uint8_t *)pairs;
        if (bits < 16) {
            codes = read_scales(part, at->panel, k / part->group, 0, scales, scales + PANEL);
            codes += k % part->group / 8 * bits * PANEL;
        }
        float totals[MAX_ROWS] = {0};
        for (int64_t i = k / 16; halves && i < end / 16; i++)
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) totals[r] += halves[r * in / 16 + i];
        __m512 products[MAX_ROWS][MAX_VECTORS];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int j = 0; j < MAX_VECTORS; j++) products[r][j] = _mm512_setzero_ps();
        for (; k < end; k += 32 / bits, codes += 4 * PANEL)
#pragma GCC unroll 4
            for (int q = 0; q < 16 / bits; q++) {
                __m512bh weights[MAX_VECTORS];
#pragma GCC unroll 4
                for (int j = 0; j < MAX_VECTORS; j++) {
                    if (bits < 16 && q == 0) __builtin_prefetch(codes + 4 * j * W + AHEAD_BYTES);
                    weights[j] = code_pair(bits, codes + 4 * j * W, q, table, zero);
                    if (is_kept) memcpy(pairs + 2 * j * W, weights + j, sizeof *weights);
                }
                if (is_kept || bits == 16) pairs += 2 * PANEL;
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) {
                    int32_t pair;
                    memcpy(&pair, x + r * in + k + 2 * q, sizeof pair);
                    const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
                    for (int j = 0; j < MAX_VECTORS; j++)
                        products[r][j] = _mm512_dpbf16_ps(products[r][j], both, weights[j]);
                }
            }
        __asm__ volatile("" ::: "memory");  // gcc would keep sums in two places
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int j = 0; j < MAX_VECTORS; j++) {
                float *const to = sums + r * PANEL + j * W;
                vf sum = multiply_add((vf)products[r][j], load_f32(scales + j * W), load_f32(to));
                if (halves)
                    sum = multiply_add(splat(totals[r]), load_f32(scales + PANEL + j * W), sum);
                store_f32(to, sum);
            }
    }
}

// Up to MAX_ROWS rows, times codes; `is_kept` with more than MAX_ROWS / 2.
static __attribute__((noinline)) void multiply_codes(int rows, int is_kept, const bf16 *x,
                                                     int64_t in, const float *halves,
                                                     const place *at, chunk *own, float *sums) {
#define TILE_OF(rows, bits, is_kept) \
    chunk_tile(rows, bits, is_kept, x, in, halves, at, own, sums)
#define CASE(rows)                                        \
    case rows:                                            \
        if (at->part->bits == 4) TILE_OF(rows, 4, 0); \
        else TILE_OF(rows, 8, 0);                     \
        break;
#define KEEPING(rows)                                     \
    case rows + MAX_ROWS:                                 \
        if (at->part->bits == 4) TILE_OF(rows, 4, 1); \
        else TILE_OF(rows, 8, 1);                     \
        break;
    switch (is_kept ? rows + MAX_ROWS : rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
        KEEPING(4) KEEPING(5) KEEPING(6)
    }
#undef KEEPING
#undef CASE
}

// The same times pairs that are there.
static __attribute__((noinline)) void multiply_kept(int rows, const bf16 *x, int64_t in,
                                                    const float *halves, const place *at,
                                                    chunk *own, float *sums) {
#define CASE(rows) \
    case rows: TILE_OF(rows, 16, 0); break;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
    }
#undef CASE
#undef TILE_OF
}

// sums [count][PANEL] of rows and a panel.
static void multiply_panel(const bf16 *x, int64_t count, int64_t in, const float *halves,
                           const place *at, chunk *own, float *sums) {
    const int64_t tiles = ceil_div(count, MAX_ROWS), first_end = ceil_div(count, tiles);
    const int64_t group = at->part->group;
    memset(sums, 0, count * PANEL * sizeof(float));
    own->piece = smaller(group, CHUNK);
    for (own->start = 0; own->start < in; own->start = own->end) {
        const int64_t left = group > CHUNK ? group - own->start % group : in - own->start;
        own->end = own->start + smaller(CHUNK / own->piece * own->piece, left);
        multiply_codes(first_end, tiles > 1, x, in, halves, at, own, sums);
        for (int64_t row = first_end, left = tiles - 1, rows; left; row += rows, left--) {
            rows = ceil_div(count - row, left);
            multiply_kept(rows, x + row * in, in, halves ? halves + row * in / 16 : 0, at, own,
                          sums + row * PANEL);
        }
    }
}

// y [rows, out] = x [rows, in] . weight^T + bias; of bfloat16, or of float where the layer is wide.
static int linear_codes(const linear *layer, const bf16 *x, void *y, int64_t rows) {
    const int64_t in = layer->in, out = layer->out, panels = count_panels(layer);
    const int64_t blocks = ceil_div(rows, larger(BLOCK_NUMBERS / in, MAX_ROWS));
    const int64_t at_once = ceil_div(rows, blocks);
    int has_offset = 0;
    for (int64_t i = 0; i < layer->num_parts; i++) has_offset |= layer->parts[i].has_offset != 0;
    float *const halves = has_offset ? take(rows * in / 16 * sizeof(float)) : 0;
    if (has_offset && !halves) return OUT_OF_MEMORY;
    int status = DONE;
#pragma omp parallel if (rows * in * out >= PARALLEL_PRODUCTS_FROM)
    {
        chunk own __attribute__((aligned(64)));
        float *const sums = take_lines(at_once * PANEL * sizeof(float));
        if (!sums) note_shortage(&status);
        if (has_offset) {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < rows * in / 16; i++) halves[i] = sum(load_bf16(x + 16 * i));
        }
        // dynamic: on a busy machine a thread may be away for milliseconds
#pragma omp for schedule(dynamic) nowait
        for (int64_t item = 0; item < blocks * panels; item++) {
            if (!sums) continue;
            const int64_t row = item / panels * at_once, count = smaller(at_once, rows - row);
            const place at = find_panel(layer, item % panels);
            multiply_panel(x + row * in, count, in,
                           at.part->has_offset ? halves + row * in / 16 : 0, &at, &own, sums);
            for (int64_t r = 0; r < count; r++)
                store_sums_bf16(layer, sums + r * PANEL, y, row + r, at.column, at.count);
            note_maxima((maxima){layer->maxima, rows}, row, count, at.column, at.count, sums, PANEL);
        }
        free(sums);
    }
    free(halves);
    return status;
}
