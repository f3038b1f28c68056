// Products of unsigned codes of 4 or 8 bits with signed bytes, four to a lane, by what each
// instruction set has for it. All give the same integers: nothing saturates. Knows no weights.
#pragma once
#include "vector.h"

// `take_codes` makes of a vector of codes what `dot_bytes` wants. That adds up to what `begin_sums`
// gave, and after at most 32 inputs `end_sums` makes 32 bits of it, added to `own`. CODE_ZERO(bits):
// what a code counts less there than it is.
#if (W == 16 && defined(__AVX512VNNI__)) || (W == 8 && defined(__AVXVNNI__))

typedef vi weight_bytes;
#define CODE_ZERO(bits) 0

INLINE weight_bytes take_codes(int bits, vi codes) {
    (void)bits;
    __asm__("" : "+v"(codes));  // gcc would read them again for every row
    return codes;
}

INLINE vi dot_bytes(int bits, vi sums, weight_bytes w, vi x) {
    (void)bits;
#if W == 16
    return (vi)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, (__m512i)x);
#else
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)w, (__m256i)x);
#endif
}

INLINE vi begin_sums(int bits, vi own) { (void)bits; return own; }
INLINE vi end_sums(int bits, vi own, vi sums) { (void)bits, (void)own; return sums; }

#elif W >= 8

// Pairs are added up in 16 bits. Codes of 4 bits: eight of those sums fit, 8 * 2 * 15 * 127 < 2^15.
// Of 8 bits: less 128, their size by x of their sign fits, 2 * 128 * 127 < 2^15; its sum is widened.
typedef struct {
    vi size, sign;
} weight_bytes;
#define CODE_ZERO(bits) ((bits) == 8 ? 128 : 0)

#if W == 16
#define OF16(name) _mm512_##name
typedef __m512i bits_vector;
INLINE vi with_sign_of(vi x, vi sign) {
    const __mmask64 is_less = _mm512_movepi8_mask((__m512i)sign);
    return (vi)_mm512_mask_sub_epi8((__m512i)x, is_less, (__m512i)(vi){0}, (__m512i)x);
}
#else
#define OF16(name) _mm256_##name
typedef __m256i bits_vector;
INLINE vi with_sign_of(vi x, vi sign) {
    return (vi)_mm256_sign_epi8((__m256i)x, (__m256i)sign);
}
#endif

INLINE vi pair_sums(vi sums) {
    return (vi)OF16(madd_epi16)((bits_vector)sums, OF16(set1_epi16)(1));
}

INLINE weight_bytes take_codes(int bits, vi codes) {
    if (bits == 4) return (weight_bytes){codes, codes};
    const vi less = codes ^ (vi)((vu){0} + 0x80808080);
    return (weight_bytes){(vi)OF16(abs_epi8)((bits_vector)less), less};
}

INLINE vi dot_bytes(int bits, vi sums, weight_bytes w, vi x) {
    if (bits == 8) x = with_sign_of(x, w.sign);
    const vi pairs = (vi)OF16(maddubs_epi16)((bits_vector)w.size, (bits_vector)x);
    if (bits == 4) sums = (vi)OF16(add_epi16)((bits_vector)sums, (bits_vector)pairs);
    else sums += pair_sums(pairs);
    __asm__("" : "+v"(sums));  // as in `dot_pairs`
    return sums;
}

INLINE vi begin_sums(int bits, vi own) { return bits == 4 ? (vi){0} : own; }
INLINE vi end_sums(int bits, vi own, vi sums) {
    return bits == 4 ? own + pair_sums(sums) : sums;
}

#else

// By products of 16 bits: of the bytes at even places, then of those at odd ones.
typedef int16_t vp __attribute__((vector_size(4 * W)));
typedef struct {
    vi even, odd;
} weight_bytes;
#define CODE_ZERO(bits) 0

INLINE weight_bytes take_codes(int bits, vi codes) {
    (void)bits;
    return (weight_bytes){codes & 0x00ff00ff, (codes >> 8) & 0x00ff00ff};
}

INLINE vi dot_bytes(int bits, vi sums, weight_bytes w, vi x) {
    (void)bits;
    return dot_pairs(dot_pairs(sums, w.even, (vi)((vp)(x << 8) >> 8)), w.odd, (vi)((vp)x >> 8));
}

INLINE vi begin_sums(int bits, vi own) { (void)bits; return own; }
INLINE vi end_sums(int bits, vi own, vi sums) { (void)bits, (void)own; return sums; }

#endif
