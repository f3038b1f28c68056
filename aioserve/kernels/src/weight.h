// A weight that never changes, in panels of outputs. Knows layouts; computes nothing.
#pragma once
#include <stdint.h>

typedef struct {
    // [out / panel][in / depth][panel][depth], zeros at the end: see `panel_*` in linear.h
    const void *weight;
    const void *bias;  // as many as there are outputs in all panels, or null
    int64_t in, out;   // `in` is a multiple of `depth`
} linear;

#define PARALLEL_PRODUCTS_FROM (1 << 17)  // products; fewer are done before the others have started
