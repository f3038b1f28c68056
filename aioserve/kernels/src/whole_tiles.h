// Products of many rows of whole numbers with weights of a few bits, by AMX: the same sums as those of
// whole.h. A number of 12 bits is two of 8, of which one counts 16 times.
//
// Tiles have 16 rows, 32 inputs and 16 outputs.
#pragma once
#include "tiles.h"
#include "whole.h"

#define TILES_FROM 14   // rows; measured
#define TILED_ROWS 64   // whose sums are at hand at a time
#define STEPS 6         // of a panel, unpacked at a time: with a tile of rows they fit the first cache

// Sums are tiles 0 to 3. Of 4 bits, a row's high numbers and its low ones lie side by side in tile 4,
// codes times 16 above codes in tile 5. Of 8 bits either of a row are in tile 6, codes in tile 7.
INLINE void begin_tiles(void) {
    tile_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.row_bytes[i] = i == 6 ? 32 : 64, config.rows[i] = i == 7 ? 8 : 16;
    IS_WRITTEN(&config);
    _tile_loadconfig(&config);
}

INLINE void end_tiles(void) { _tile_release(); }

// 32 inputs of 16 rows: the high 8 bits of all, then the low 4, in the order in which codes lie.
typedef struct {
    int8_t values[16][64];
    float scales[16], sums[3][16];  // as in `share`
} row_tile;

static void fill_row_tile(const whole_rows *x, int64_t row, row_tile *tiles) {
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
    row_tile *to = tiles + row / 16 * (x->in / SHARED);
    const int64_t r = row % 16;
    for (int64_t k = 0; k < x->in / SHARED; k++, to++) {
        const __m512i both = _mm512_loadu_si512(x->values + row * x->stride + k * SHARED);
        const __m256i high = _mm512_cvtepi16_epi8(_mm512_srai_epi16(both, 4));
        const __m256i low = _mm512_cvtepi16_epi8(_mm512_and_si512(both, _mm512_set1_epi16(15)));
        _mm256_storeu_si256((__m256i *)to->values[r], _mm256_shuffle_epi8(high, order));
        _mm256_storeu_si256((__m256i *)(to->values[r] + 32), _mm256_shuffle_epi8(low, order));
        const share *own = x->shares + row * (x->in / SHARED) + k;
        to->scales[r] = own->scale;
        to->sums[0][r] = own->sum;
        to->sums[1][r] = own->halves[0], to->sums[2][r] = own->halves[1];
    }
}

// Some inputs of a panel, for all rows. A step is 32 inputs, or 16 where a group is: the others count
// 0 then. Of 8 bits, half of `codes` is used.
typedef struct {
    __m512i codes[PANEL / 16][STEPS][16];
    float scales[STEPS][2][PANEL];
} tiled_codes;

static void unpack_tiles(const place *at, int64_t first, int64_t steps, tiled_codes *to) {
    const __m512i low = _mm512_set1_epi8(15), high = _mm512_set1_epi8((char)0xf0);
    const block_part *part = at->part;
    const int64_t size = smaller(part->group, SHARED);
    const uint8_t *codes = 0;
    for (int64_t step = 0; step < steps; step++) {
        const int64_t start = (first + step) * size;
        float(*scales)[PANEL] = to->scales[step];
        if (step == 0 || start % part->group == 0)
            codes = read_scales(part, at->panel, start / part->group, part->zero, scales[0],
                                scales[1]) +
                    start % part->group * PANEL / 8 * part->bits;
        else memcpy(scales, to->scales[step - 1], sizeof to->scales[0]);
        const int from = size < SHARED && start / size % 2 ? 4 : 0;
        for (int c = 0; c < PANEL / 16 && size < SHARED; c++)
            memset(to->codes[c][step], 0, sizeof to->codes[c][step]);
        for (int i = from; i < from + size / 4; i += 8 / part->bits, codes += 4 * PANEL)
            for (int c = 0; c < PANEL / 16; c++) {
                __m512i *own = to->codes[c][step] + i;
                const __m512i both = _mm512_loadu_si512(codes + 64 * c);
                _mm_prefetch(codes + 64 * c + AHEAD_BYTES, _MM_HINT_T0);
                if (part->bits == 8) {
                    own[0] = both;
                    continue;
                }
                own[0] = _mm512_and_si512(_mm512_slli_epi16(both, 4), high);
                own[1] = _mm512_and_si512(both, high);
                own[8] = _mm512_and_si512(both, low);
                own[9] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
            }
    }
}

typedef int32_t tile_sums[2][16][16];  // of 4 bits the first alone

#define MULTIPLY_4(sums)               \
    do {                               \
        _tile_zero(sums);              \
        _tile_loadd(4, x, 64);         \
        _tile_loadd(5, codes, 64);     \
        _tile_dpbsud(sums, 4, 5);      \
        _tile_stored(sums, to[0], 64); \
    } while (0)
#define MULTIPLY_8(high, low)          \
    do {                               \
        _tile_zero(high);              \
        _tile_zero(low);               \
        _tile_loadd(7, codes, 64);     \
        _tile_loadd(6, x, 64);         \
        _tile_dpbsud(high, 6, 7);      \
        _tile_loadd(6, (x) + 32, 64);  \
        _tile_dpbsud(low, 6, 7);       \
        _tile_stored(high, to[0], 64); \
        _tile_stored(low, to[1], 64);  \
    } while (0)

INLINE void multiply_step(int bits, const int8_t *x, const __m512i *codes, int is_odd,
                          tile_sums to) {
    if (bits == 8 && is_odd) MULTIPLY_8(0, 1);
    else if (bits == 8) MULTIPLY_8(2, 3);
    else if (is_odd) MULTIPLY_4(0);
    else MULTIPLY_4(1);
}

// sums [16][PANEL] += what `steps` of a column are worth; from 0 if `first` is. Constant bits.
INLINE void tile_column(int bits, const row_tile *x, int64_t size, int64_t first, int64_t steps,
                        const tiled_codes *panel, int column, float *sums) {
    const int per_tile = size < SHARED ? 2 : 1;
    tile_sums q[2] __attribute__((aligned(64)));
    vf total[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++)
        total[r] = first ? load_f32(sums + r * PANEL + 16 * column) : splat(0);
    for (int64_t step = 0; step <= steps; step++) {
        if (step < steps)  // one is multiplied while the one before is added up
            multiply_step(bits, x[(first + step) / per_tile].values[0],
                          panel->codes[column][step], step % 2, q[step % 2]);
        if (!step) continue;
        IS_WRITTEN(q);
        const int64_t last = first + step - 1;
        const row_tile *own = x + last / per_tile;
        const float *totals = own->sums[size < SHARED ? 1 + last % 2 : 0];
        const vf scale = load_f32(panel->scales[step - 1][0] + 16 * column);
        const vf offset = load_f32(panel->scales[step - 1][1] + 16 * column);
        tile_sums *const of = &q[(step - 1) % 2];
#pragma GCC unroll 16
        for (int r = 0; r < 16; r++) {
            vi sum = (vi)load_f32((const float *)(*of)[0][r]);
            if (bits == 8) sum = (sum << 4) + (vi)load_f32((const float *)(*of)[1][r]);
            total[r] = add_share(total[r], sum, scale, offset, totals[r], own->scales[r]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) store_f32(sums + r * PANEL + 16 * column, total[r]);
}

static __attribute__((noinline)) void multiply_column(int bits, const row_tile *x, int64_t size,
                                                      int64_t first, int64_t steps,
                                                      const tiled_codes *panel, int column,
                                                      float *sums) {
    if (bits == 4) tile_column(4, x, size, first, steps, panel, column, sums);
    else tile_column(8, x, size, first, steps, panel, column, sums);
}

// sums [rows][PANEL] of tiles of rows and a panel. Whole tiles are written.
static void multiply_tiles(int64_t rows, const row_tile *x, int64_t in, const place *at,
                           tiled_codes *room, float *sums) {
    const int64_t size = smaller(at->part->group, SHARED);
    for (int64_t first = 0; first < in / size; first += STEPS) {
        const int64_t steps = smaller(in / size - first, STEPS);
        unpack_tiles(at, first, steps, room);
        IS_WRITTEN(room);
        for (int64_t row = 0; row < rows; row += 16)
            for (int column = 0; 16 * column < at->count; column++)
                multiply_column(at->part->bits, x + row / 16 * (in / SHARED), size, first, steps,
                                room, column, sums + row * PANEL);
    }
}
