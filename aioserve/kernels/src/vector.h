// Vectors of W floats, by the compiler's own vector types: one source for every instruction set.
// Knows numbers and rounding; knows nothing about models.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define W 16
#elif defined(__AVX2__)
#define W 8
#else
#define W 4
#endif

typedef uint16_t bf16, f16;
typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));

#define INLINE static inline __attribute__((always_inline))
#define LINE 64  // bytes that memory gives at a time

INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vf splat_bits(const float *p) {  // whatever the 32 bits mean
    int32_t bits;
    memcpy(&bits, p, sizeof bits);
    return (vf)(bits - (vi){0});
}
INLINE vf pick(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
INLINE vf maximum(vf a, vf b) {  // b where a is NaN
#if W == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif W == 8
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return pick(a > b, a, b);
#endif
}

// a * b + sum, rounded once where there is an instruction for it: everywhere or nowhere.
INLINE vf multiply_add(vf a, vf b, vf sum) {
#if W == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif W == 8
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
    return sum + a * b;
#endif
}

// The same two, in the order in which they are written: where there are 16 registers for them, gcc 12
// would load early, and keep sums in memory.
#if W == 8
#define IN_ORDER __asm__ volatile
INLINE vf splat_in_order(const float *p) {
    vf v;
    IN_ORDER("vbroadcastss %1, %0" : "=x"(v) : "m"(*p));
    return v;
}
INLINE vf add_in_order(vf a, vf b, vf sum) {
    IN_ORDER("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
}
#else
#define splat_in_order splat_bits
#define add_in_order multiply_add
#endif

INLINE vf load_f32(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE void store_f32(float *p, vf v) { memcpy(p, &v, sizeof v); }

// 16 bits to 32, and the low 16 back. By hand for 8 lanes and more: gcc 12 would convert two halves.
INLINE vu widen(vh h) {
#if W == 16
    return (vu)_mm512_cvtepu16_epi32((__m256i)h);
#elif W == 8
    return (vu)_mm256_cvtepu16_epi32((__m128i)h);
#else
    return __builtin_convertvector(h, vu);
#endif
}
INLINE vh narrow(vu v) {
#if W == 16
    return (vh)_mm512_cvtepi32_epi16((__m512i)v);
#else
    return __builtin_convertvector(v, vh);
#endif
}

// Bytes to 32 bits. By hand for 8 lanes and more, as above.
INLINE vu widen_bytes(const uint8_t *p) {
#if W == 16
    return (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif W == 8
    return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    uint8_t b __attribute__((vector_size(W)));
    memcpy(&b, p, sizeof b);
    return __builtin_convertvector(b, vu);
#endif
}

INLINE vf to_floats(vi v) {
#if W == 16
    return (vf)_mm512_cvtepi32_ps((__m512i)v);
#else
    return __builtin_convertvector(v, vf);
#endif
}

// To nearest, ties to even; |v| < 2^22.
INLINE vi to_ints(vf v) { return (vi)(v + 12582912.f) - 0x4b400000; }

// sum + a[0] * b[0] + a[1] * b[1] for the pairs of 16 bits in each lane.
INLINE vi dot_pairs(vi sum, vi a, vi b) {
#if W == 16 && defined(__AVX512VNNI__)
    return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif W == 16
    sum += (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif W == 8
    sum += (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    sum += (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#elif defined(__aarch64__)
    const int16x8_t c = (int16x8_t)a, d = (int16x8_t)b;
    sum += (vi)vpaddq_s32(vmull_s16(vget_low_s16(c), vget_low_s16(d)), vmull_high_s16(c, d));
#else
    sum += (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
#ifdef __x86_64__
    __asm__("" : "+v"(sum));  // gcc would add up products first, for which there are no registers
#endif
    return sum;
}

INLINE vi widen_signed_bytes(const uint8_t *p) {
#if W == 16
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif W == 8
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    return (vi)(widen_bytes(p) << 24) >> 24;
#endif
}
INLINE vf signed_bytes(const uint8_t *p) { return to_floats(widen_signed_bytes(p)); }

INLINE vf load_bf16(const bf16 *p) {
    vh h;
    memcpy(&h, p, sizeof h);
    return (vf)(widen(h) << 16);
}

// Of 2 * W numbers those at even places, or at odd ones: without moving any between lanes.
INLINE vf load_half_bf16(const bf16 *p, int is_odd) {
    vu both;
    memcpy(&both, p, sizeof both);
    return (vf)(is_odd ? both & 0xffff0000 : both << 16);
}

INLINE void store_bf16(bf16 *p, vf v) {  // to nearest, ties to even; NaN stays NaN
#ifdef __AVX512BF16__
    vh h = (vh)_mm512_cvtneps_pbh((__m512)v);
#else
    vu bits = (vu)v;
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vh h = narrow((vu)pick(v == v, (vf)bits, (vf)((vu){0} + 0x7fc0)));
#endif
    memcpy(p, &h, sizeof h);
}

#if defined(__F16C__) || defined(__aarch64__)
#define HAS_F16
#endif

INLINE vf load_f16(const f16 *p) {
    vh h;
    memcpy(&h, p, sizeof h);
#if W == 16
    return (vf)_mm512_cvtph_ps((__m256i)h);
#elif W == 8 && defined(HAS_F16)
    return (vf)_mm256_cvtph_ps((__m128i)h);
#elif defined(HAS_F16)
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16((uint16x4_t)h));
#else  // the exponent is moved by a product, which also serves numbers too small for their own
    vu bits = widen(h), sign = (bits & 0x8000) << 16;
    vf v = (vf)((bits & 0x7fff) << 13) * 0x1p112f;
    return (vf)((vu)v | sign | ((vu)(v >= 0x1p16f) & 0x7f800000));
#endif
}

INLINE void store_f16(f16 *p, vf v) {  // as store_bf16; beyond 65519 it is infinite
#if W == 16
    vh h = (vh)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif W == 8 && defined(HAS_F16)
    vh h = (vh)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(HAS_F16)
    vh h = (vh)vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v));
#else
    vu sign = (vu)v >> 16 & 0x8000, size = (vu)v & 0x7fffffff;
    vu normal = (size + 0xfff + (size >> 13 & 1) - (112u << 23)) >> 13;
    vu small = (vu)((vf)size + 0.5f) - 0x3f000000;  // the sum rounds to steps of 2^-24
    vu bits = (vu)pick((vi)((vf)size < 0x1p-14f), (vf)small, (vf)normal);
    vu huge = (vu)pick(v == v, (vf)((vu){0} + 0x7c00), (vf)((vu){0} + 0x7e00));
    vh h = narrow((vu)pick((vi)((vf)size < 65520.f), (vf)bits, (vf)huge) | sign);
#endif
    memcpy(p, &h, sizeof h);
}

INLINE float sum(vf v) {
#if W == 16
    return _mm512_reduce_add_ps((__m512)v);
#else
    float total = 0;
    for (int i = 0; i < W; i++) total += v[i];
    return total;
#endif
}

INLINE float highest(vf v) {
#if W == 16
    return _mm512_reduce_max_ps((__m512)v);
#elif W == 8
    __m128 top = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    top = _mm_max_ps(top, _mm_movehl_ps(top, top));
    return _mm_cvtss_f32(_mm_max_ss(top, _mm_movehdup_ps(top)));
#else
    float top = v[0];
    for (int i = 1; i < W; i++) top = v[i] > top ? v[i] : top;
    return top;
#endif
}

// Of n numbers, a multiple of 2 * W, a vector with the largest; infinity where one is NaN, and where
// infinities meet. Two turns beside each other: a maximum takes several cycles.
INLINE vf high_lanes(const float *p, int64_t n) {
    vf high[2], totals[2];
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) high[j] = totals[j] = load_f32(p + j * W);
#pragma GCC unroll 4
    for (int64_t i = 2 * W; i < n; i += 2 * W)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            high[j] = maximum(load_f32(p + i + j * W), high[j]);
            totals[j] += load_f32(p + i + j * W);
        }
    const vf total = totals[0] + totals[1];
    return pick(total == total, maximum(high[0], high[1]), splat(INFINITY));
}

// The largest of n numbers, a multiple of 2 * W; NaN if there is any.
INLINE float largest(const float *p, int64_t n) {
    float most = highest(high_lanes(p, n));
    if (most < INFINITY) return most;
    most = *p;
    for (int64_t i = 1; i < n && most == most; i++)
        if (!(p[i] <= most)) most = p[i];
    return most;
}

#define LOG2E 1.44269504f
#define ROUNDER 12582912.f  // 1.5 * 2^23: added and taken away, it rounds to an integer

// 2^n * e^r for |r| <= ln(2) / 2 and whole n in [-126, 127]. Polynomial of Cephes' expf.
INLINE vf scaled_exp(vf n, vf r) {
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + (r + 1.f);
    return (vf)((vi)p + ((vi)(n + ROUNDER) << 23));
}

// e^x to 2 units in the last place; x is cut to [-87, 88].
INLINE vf exp_(vf x) {
    x = pick(x < 88.f, x, splat(88.f));
    x = pick(x > -87.f, x, splat(-87.f));  // also NaN: what multiplies it must carry the NaN
    vf n = x * LOG2E + ROUNDER - ROUNDER;
    return scaled_exp(n, x - n * 0.693359375f + n * 2.12194440e-4f);  // ln(2) in two parts
}

// 2^x, 0 below 2^-126, also for -inf; x <= 127.
INLINE vf exp2_(vf x) {
    x = maximum(x, splat(-150.f));
    vf n = x + ROUNDER - ROUNDER;
    return (vf)((x >= -126.f) & (vi)scaled_exp(n, (x - n) * 0.693147181f));
}

// The same to 3e-6 relative, for weights of keys beside numbers of two bytes.
INLINE vf exp2_rough(vf x) {
    x = maximum(x, splat(-150.f));
    vf rounded = x + ROUNDER, n = rounded - ROUNDER, r = x - n, p = splat(9.570097e-3f);  // minimax
    p = p * r + 5.591786e-2f;
    p = p * r + 2.402474e-1f;
    p = p * r + 6.931218e-1f;
    p = p * r + 9.999993e-1f;
#if W == 16
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    return (vf)((x >= -126.f) & ((vi)p + ((vi)rounded << 23)));
#endif
}

// The same where x is finite or NaN, which stays NaN with 16 lanes.
INLINE vf exp2_finite(vf x) {
#if W == 16
    const vf r = (vf)_mm512_reduce_ps((__m512)x, 1);  // x less the whole number below it
    vf p = splat(1.35341678e-2f);                     // minimax
    p = p * r + 5.20114601e-2f;
    p = p * r + 2.41442755e-1f;
    p = p * r + 6.93003833e-1f;
    p = p * r + 1.00000262f;
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
    return exp2_rough(x);
#endif
}

#if W == 16
#define INDEXES ((vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})
#elif W == 8
#define INDEXES ((vi){0, 1, 2, 3, 4, 5, 6, 7})
#else
#define INDEXES ((vi){0, 1, 2, 3})
#endif

// W vectors of W lanes, in place: swap the off-diagonal quarters, at every scale.
INLINE void transpose(vf v[W]) {
#pragma GCC unroll 4
    for (int step = 1; step < W; step *= 2) {
        vi is_high = (INDEXES & step) != 0;
        vi low = (is_high & (INDEXES + (W - step))) | (~is_high & INDEXES);
        vi high = (is_high & (INDEXES + W)) | (~is_high & (INDEXES + step));
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) {
            if (i & step) continue;
            vf a = v[i], b = v[i + step];
            v[i] = __builtin_shuffle(a, b, low);
            v[i + step] = __builtin_shuffle(a, b, high);
        }
    }
}

// The highest of each of W vectors, side by side: what `transpose` swaps, of which the higher goes on.
INLINE vf highest_of_each(vf v[W]) {
#pragma GCC unroll 4
    for (int step = 1; step < W; step *= 2) {
        vi is_high = (INDEXES & step) != 0;
        vi low = (is_high & (INDEXES + (W - step))) | (~is_high & INDEXES);
        vi high = (is_high & (INDEXES + W)) | (~is_high & (INDEXES + step));
#pragma GCC unroll 16
        for (int i = 0; i < W; i += 2 * step)
            v[i] = maximum(__builtin_shuffle(v[i], v[i + step], low),
                           __builtin_shuffle(v[i], v[i + step], high));
    }
    return v[0];
}

// 2 * W floats in the order of `load_half_bf16` back to their own.
INLINE void zip(float *p) {
    vf even = load_f32(p), odd = load_f32(p + W);
    vi order = (INDEXES >> 1) + (INDEXES & 1) * W;
    store_f32(p, __builtin_shuffle(even, odd, order));
    store_f32(p + W, __builtin_shuffle(even, odd, order + W / 2));
}
