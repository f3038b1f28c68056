// All kernels for one element type: T, LOAD, LOAD_PART, ORDER_PARTS, STORE, DEPTH, NAME.
#include "linear_blocks.h"
#include "linear_int8.h"
#ifdef PAIRS
#include "linear_pairs.h"
#else
#include "linear.h"
#endif
#ifdef DOTS
#include "direct_pairs.h"
#else
#include "direct.h"
#endif
#include "elementwise.h"
#define K T
#define LOAD_K LOAD
#define ROW(n) (n)
#define OVER(name) NAME(name)
#define UNIT 16
#include "attention.h"
#undef K
#undef LOAD_K
#undef ROW
#undef OVER
#define CODES
#define K uint8_t
#define LOAD_K signed_bytes
#define ROW CODE_ROW
#define OVER(name) NAME(name##_int8)
#include "attention.h"
#undef CODES
#undef LOAD_K
#undef OVER
#undef UNIT
#define UNIT TOGETHER
#define OVER(name) NAME(name##_bytes)
#include "attention_bytes.h"
#undef K
#undef ROW
#undef OVER
#undef UNIT
#include "low_rank.h"
#include "experts.h"
#include "decoder.h"
#undef T
#undef LOAD
#undef LOAD_PART
#undef ORDER_PARTS
#undef STORE
#undef DEPTH
#undef NAME
