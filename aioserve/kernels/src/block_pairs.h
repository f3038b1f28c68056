// Quantized weights as pairs of bfloat16, in panels as linear_pairs.h has them.
#pragma once
#include "whole.h"

// PANEL outputs of 32 bits of codes each, as [16 / bits][PANEL][2].
INLINE void unpack_codes_to_pairs(int bits, int zero, const uint8_t *codes, const float *scales,
                                  const float *offsets, bf16 *to) {
    // of 16 outputs, a first input beside each second one
    const __m512i beside = (__m512i)(INDEXES | (INDEXES + 16) << 16);
    for (int j = 0; j < PANEL; j += W) {
        const vi both = (vi)load_f32((const float *)codes + j);
        const vf scale = load_f32(scales + j), offset = load_f32(offsets + j);
#pragma GCC unroll 4
        for (int q = 0; q < 16 / bits; q++) {
            const vi pair = pair_of(bits, both, q);
            const vf first = multiply_add(to_floats((pair & 0xffff) - zero), scale, offset);
            const vf second = multiply_add(to_floats((pair >> 16) - zero), scale, offset);
            const __m512bh rounded = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
            const __m512i pairs = _mm512_permutexvar_epi16(beside, (__m512i)rounded);
            memcpy(to + 2 * (q * PANEL + j), &pairs, sizeof pairs);
        }
    }
}

// A panel as [in / 2][PANEL][2].
static void unpack_pairs(const place *at, int64_t in, bf16 *to) {
    const block_part *part = at->part;
    const int bits = part->bits, zero = part->zero;
    float scales[PANEL], offsets[PANEL];
    bf16 *own = to;
    for (int64_t group = 0; group < in / part->group; group++) {
        const uint8_t *codes = read_scales(part, at->panel, group, 0, scales, offsets);
        for (int64_t k = 0; k < part->group; k += 32 / bits, codes += 4 * PANEL) {
            for (int line = 0; line < 4 * PANEL; line += LINE)
                __builtin_prefetch(codes + line + AHEAD_BYTES);
            if (bits == 4) unpack_codes_to_pairs(4, zero, codes, scales, offsets, own);
            else unpack_codes_to_pairs(8, zero, codes, scales, offsets, own);
            own += 32 / bits * PANEL;
        }
    }
    IS_WRITTEN(to);
}
