// All kernels for one element type: T, LOAD, LOAD_PART, ORDER_PARTS, STORE, DEPTH, NAME.
#include "linear_blocks.h"
#ifdef PAIRS
#include "direct_pairs.h"
#include "linear_pairs.h"
#else
#include "linear.h"
#include "direct.h"
#endif
#include "elementwise.h"
#include "attention.h"
#include "decoder.h"
#undef T
#undef LOAD
#undef LOAD_PART
#undef ORDER_PARTS
#undef STORE
#undef DEPTH
#undef NAME
