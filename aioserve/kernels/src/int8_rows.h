// Rows of activations quantized to 8 bits as they arrive: `scale * byte`, symmetric, one scale for
// 32 inputs. Knows no element types and no weights.
#pragma once
#include <math.h>
#include "codes.h"
#include "plan.h"

#define INT8_BLOCK 32  // inputs that share a scale; 64 cost four times the quality

// Of the inputs of a block: their scale, and the sums of their bytes, of all and of both halves.
typedef struct {
    float scale;    // NaN where a number is not finite
    int32_t start;  // less the sum, times what the codes of the rows' `zero` are too large
    int32_t sum, halves[2];
} int8_share;

typedef struct {
    uint8_t *bytes;      // [rows][stride]
    int8_share *shares;  // [rows][in / INT8_BLOCK]
    int64_t in, stride;
    int64_t zero;  // of codes, for which `start` is made
} int8_rows;

// Its `bytes` are null where there is no memory.
static int8_rows allocate_int8(int64_t rows, int64_t in, int64_t zero) {
    int8_rows x = {.in = in, .stride = in + 64, .zero = zero};  // not all rows in one set of the cache
    const int64_t bytes = x.stride + in / INT8_BLOCK * sizeof(int8_share);
    x.bytes = take_lines(rows * bytes);
    if (!x.bytes) return x;
    x.shares = (int8_share *)(x.bytes + rows * x.stride);
    return x;
}

// 16 bytes in the order of codes in a panel, 0, 2, 1, 3 of every four (see weight.h); returns their
// sum.
INLINE int32_t store_bytes(const uint8_t *bytes, uint8_t *to) {
#ifdef __AVX2__
    const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    const __m128i signs = _mm_set1_epi8(-128), own = _mm_loadu_si128((const __m128i *)bytes);
    _mm_storeu_si128((__m128i *)to, _mm_shuffle_epi8(own, order));
    const __m128i halves = _mm_sad_epu8(_mm_xor_si128(own, signs), _mm_setzero_si128());
    return _mm_cvtsi128_si32(_mm_add_epi32(halves, _mm_unpackhi_epi64(halves, halves))) - 16 * 128;
#else
    int32_t total = 0;
    for (int i = 0; i < 16; i++) {
        to[i / 4 * 4 + i % 2 * 2 + i % 4 / 2] = bytes[i];
        total += (int8_t)bytes[i];
    }
    return total;
#endif
}

// The largest of numbers without sign, as bits: what is not finite is above all that is.
INLINE int32_t most_bits(vi v) {
#if W == 16
    return _mm512_reduce_max_epi32((__m512i)v);
#else
    int32_t most = v[0];
    for (int i = 1; i < W; i++) most = v[i] > most ? v[i] : most;
    return most;
#endif
}

// One block of a row, `numbers` [INT8_BLOCK]: each byte is the nearest, ties to even, the largest
// number 127 or -127.
INLINE void quantize_block(const int8_rows *x, int64_t row, int64_t start, const float *numbers) {
    vi top = {0};
    for (int k = 0; k < INT8_BLOCK; k += W) {
        const vi size = (vi)load_f32(numbers + k) & 0x7fffffff;
#if W == 16
        top = (vi)_mm512_max_epi32((__m512i)size, (__m512i)top);
#else
        const vi is_more = size > top;
        top = (is_more & size) | (~is_more & top);
#endif
    }
    const int32_t bits = most_bits(top);
    float most;
    memcpy(&most, &bits, sizeof most);
    const int is_some = most >= 0x1p-100f;  // the inverse of less could be infinite
    const float inverse = is_some ? 127.f / most : 0.f;
    int8_share to = {.scale = is_some ? most / 127.f : 0.f};
    if (bits >= 0x7f800000) to.scale = NAN;
    uint8_t *const at = x->bytes + row * x->stride + start;
    for (int half = 0; half < 2; half++) {
        uint8_t bytes[16];
        for (int i = 0; i < 16; i += W)
            store_codes(bytes + i, load_f32(numbers + 16 * half + i) * inverse);
        to.halves[half] = store_bytes(bytes, at + 16 * half);
    }
    to.sum = to.halves[0] + to.halves[1];
    to.start = -(int32_t)x->zero * to.sum;
    x->shares[(row * x->in + start) / INT8_BLOCK] = to;
}
