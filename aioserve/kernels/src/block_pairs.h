// Weights of a few bits to pairs of bfloat16, as a panel of linear_pairs.h has them.
#pragma once
#include "blocks.h"

typedef struct {  // of a group; each number twice, for the two inputs of a pair
    vf scales[8], offsets[8];
} pair_scales;

INLINE const uint8_t *read_pair_scales(const block_part *part, const uint8_t *panel, int64_t group,
                                       pair_scales *to) {
    float scales[PANEL], offsets[PANEL];
    const uint8_t *codes = read_scales(part, panel, group, scales, offsets);
    const __m512i twice = (__m512i)(INDEXES >> 1);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        const __m512 scale = _mm512_castps256_ps512(_mm256_loadu_ps(scales + 8 * j));
        const __m512 offset = _mm512_castps256_ps512(_mm256_loadu_ps(offsets + 8 * j));
        to->scales[j] = (vf)_mm512_permutexvar_ps(twice, scale);
        to->offsets[j] = (vf)_mm512_permutexvar_ps(twice, offset);
    }
    return codes;
}

INLINE __m512bh round_pairs(vf low, vf high) {
    return _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}

// Of a pair of inputs and all outputs of a panel, as 4 vectors.
INLINE void read_pairs(int bits, const uint8_t *codes, const pair_scales *by, __m512bh pairs[4]) {
    vf w[8];
    if (bits == 8) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) w[j] = signed_bytes(codes + 16 * j);
    } else {
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const vi both = (vi)widen_bytes(codes + 16 * j);
            w[j] = to_floats(both & 15);
            w[j + 4] = to_floats(both >> 4);
        }
    }
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) w[j] = multiply_add(w[j], by->scales[j], by->offsets[j]);
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) pairs[c] = round_pairs(w[2 * c], w[2 * c + 1]);
}

INLINE void unpack_pairs_as(int bits, const block_part *part, const uint8_t *panel, int64_t start,
                            int64_t n, bf16 *to) {
    pair_scales by;
    for (int64_t group = start / part->group; group < (start + n) / part->group; group++) {
        const uint8_t *codes = read_pair_scales(part, panel, group, &by);
        for (int64_t i = 0; i < part->group; i += 2, codes += PANEL / 4 * bits, to += 2 * PANEL) {
            __m512bh pairs[4];
            read_pairs(bits, codes, &by, pairs);
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) memcpy(to + 32 * c, pairs + c, sizeof *pairs);
        }
    }
}

// Inputs [start, start + n) of a panel, as [n / 2][PANEL][2]; both are multiples of a group.
static void unpack_pairs(const place *at, int64_t start, int64_t n, bf16 *to) {
    if (at->part->bits == 4) unpack_pairs_as(4, at->part, at->panel, start, n, to);
    else unpack_pairs_as(8, at->part, at->panel, start, n, to);
}
