// The kernels for all element types; built once per instruction set (see setup.py), called
// through ctypes (see ../library.py). Knows no Python, no torch, and no OpenMP runtime of its own.
#include "plan.h"
#include "vector.h"

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)

#define T float
#define LOAD load_f32
#define STORE store_f32
#define NAME(name) JOIN(name, f32)
#include "elementwise.h"
#include "attention.h"
#undef T
#undef LOAD
#undef STORE
#undef NAME

#define T f16
#define LOAD load_f16
#define STORE store_f16
#define NAME(name) JOIN(name, f16)
#include "elementwise.h"
#include "attention.h"
#undef T
#undef LOAD
#undef STORE
#undef NAME

#define T bf16
#define LOAD load_bf16
#define STORE store_bf16
#define NAME(name) JOIN(name, bf16)
#ifdef __AVX512BF16__
#define PAIRS
#include "direct.h"
#endif
#include "elementwise.h"
#include "attention.h"
#ifdef PAIRS
#include "decoder.h"
#endif
