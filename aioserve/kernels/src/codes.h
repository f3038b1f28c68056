// K and V of a token and head in a byte per number, and the scale of all of them behind: a number is
// code * scale, the largest has the code 127 or -127. Knows how such a row lies; knows no attention.
#pragma once
#include "vector.h"

#define CODE_ROW(n) ((n) + (int64_t)sizeof(float))  // bytes of a row of n numbers

INLINE float scale_of(const uint8_t *row, int64_t n) {
    float scale;
    memcpy(&scale, row + n, sizeof scale);
    return scale;
}

// To nearest, ties to even, of what v was rounded to before: `to_ints` may round a product once.
INLINE vi nearest(vf v) {
#if W == 16
    return (vi)_mm512_cvtps_epi32((__m512)v);
#elif W == 8
    return (vi)_mm256_cvtps_epi32((__m256)v);
#elif defined(__aarch64__)
    return (vi)vcvtnq_s32_f32((float32x4_t)v);
#else
    return (vi)_mm_cvtps_epi32((__m128)v);
#endif
}

// The lowest byte of each, to nearest: of -127 to 127, or of 0 to 255.
INLINE void store_codes(uint8_t *p, vf v) {
    const vi whole = nearest(v);
#if W == 16
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)whole));
#else
    for (int i = 0; i < W; i++) p[i] = (uint8_t)whole[i];
#endif
}
