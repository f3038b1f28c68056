// The kernels for all element types; built once per instruction set (see setup.py), called
// through ctypes (see ../library.py). Knows no Python, no torch, and no OpenMP runtime of its own.
#include "blocks.h"
#include "byte_tiles.h"
#include "codes.h"
#include "plan.h"
#include "states.h"
#include "vector.h"
#include "weight.h"
#include "whole.h"

// Without it, products cost twice as much, and other libraries use what this one may not.
#if defined(__FMA__) || defined(__aarch64__)
const int64_t has_multiply_add = 1;
#else
const int64_t has_multiply_add = 0;
#endif

const int64_t kept_from = KEPT_FROM;
const int64_t rounded_from = ROUNDED_FROM;
const int64_t lanes = W;
// New tokens of a row in bfloat16, up to which its attention multiplies bytes: see attention_bytes.h.
#ifdef __AMX_BF16__
const int64_t bytes_up_to = FEW_QUERIES;
#else
const int64_t bytes_up_to = INT64_MAX;
#endif

#ifdef SOURCES_DIGEST
const char sources_digest[] = SOURCES_DIGEST;  // see ../library.py
#endif
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)

#define LANES(name) JOIN(name, floats)
#define MULTIPLY_ADD(sum, a, b) multiply_add(a, b, sum)
#include "product.h"
#undef LANES
#undef MULTIPLY_ADD

// LOAD_PART(p, i), of 2 * W numbers: those that are fastest to widen, then the others. ORDER_PARTS
// puts floats that lie so back in order. DEPTH: inputs that lie side by side in a packed weight.
#define T uint8_t
#define LOAD_PART(p, i) signed_bytes((p) + W * (i))
#define NAME(name) JOIN(name, codes)
#include "direct.h"
#undef T
#undef LOAD_PART
#undef NAME

#define T float
#define LOAD load_f32
#define LOAD_PART(p, i) load_f32((p) + W * (i))
#define ORDER_PARTS(p)
#define STORE store_f32
#define DEPTH 1
#define NAME(name) JOIN(name, f32)
#include "element.h"

#define T f16
#define LOAD load_f16
#define LOAD_PART(p, i) load_f16((p) + W * (i))
#define ORDER_PARTS(p)
#define STORE store_f16
#define DEPTH 1
#define NAME(name) JOIN(name, f16)
#include "element.h"

#ifdef __AVX512BF16__
#define PAIRS
#endif
// Attention by dot products of pairs, but where AMX is by its tiles, and by floats where keys are read as
// they lie: Intel's CPUs make half as many products by pairs as by floats. Measured on such a Xeon.
#if defined(PAIRS) && !defined(__AMX_BF16__)
#define DOTS
#define LANES(name) JOIN(name, pairs)
#define MULTIPLY_ADD(sum, a, b) \
    (vf) _mm512_dpbf16_ps((__m512)(sum), (__m512bh)(a), (__m512bh)(b))
#include "product.h"
#endif
#ifdef __AMX_BF16__
#include "attention_tiles.h"
#define TILES
#endif
#define T bf16
#define LOAD load_bf16
#define LOAD_PART load_half_bf16
#define ORDER_PARTS(p) zip(p)
#define STORE store_bf16
#define DEPTH 2
#define NAME(name) JOIN(name, bf16)
#include "element.h"
