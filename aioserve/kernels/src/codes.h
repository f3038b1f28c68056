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

// To nearest, ties to even; -127 to 127.
INLINE void store_codes(uint8_t *p, vf v) {
#if W == 16
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)v)));
#else
#if W == 8
    vi whole = (vi)_mm256_cvtps_epi32((__m256)v);
#elif defined(__aarch64__)
    vi whole = (vi)vcvtnq_s32_f32((float32x4_t)v);
#else
    vi whole = (vi)_mm_cvtps_epi32((__m128)v);
#endif
    for (int i = 0; i < W; i++) p[i] = (uint8_t)whole[i];
#endif
}
