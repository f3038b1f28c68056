// A weight that never changes, in panels of outputs. Knows layouts; computes nothing.
#pragma once
#include <stdint.h>

// Some outputs of a weight as codes of 4 or 8 bits without sign, `scale * (code - zero) + offset`,
// one scale for `group` inputs of an output; offsets are stored, or 0.
//
// A panel lies together. For each group: a float16 scale per output, as many offsets if they are
// stored, then the codes, 32 bits of an output after 32 bits of the next. Those are 4 bytes, for the
// inputs 0, 2, 1 and 3: so a mask gives 16 bits for each of two neighbours. Of 8 bits each is a code;
// of 4 bits the low halves are those of 4 inputs, the high ones those of the next 4. With
// `per_super`, a scale or offset of a group is a signed byte, times a float16 number that
// `per_super` groups share and that lies before them.
typedef struct {
    const uint8_t *panels;  // padded with zeros
    int64_t out, bits;
    int64_t group;      // 16, or a multiple of 32
    int64_t per_super;  // 0: none
    int64_t has_offset, zero;
    int64_t panel_bytes;
} block_part;

typedef struct {
    // [out / panel][in / depth][panel][depth], zeros at the end: see `panel_*` in linear.h
    const void *weight;
    const void *bias;  // as many as there are outputs in all panels, or null
    int64_t in, out;   // `in` is a multiple of `depth`
    const block_part *parts;  // instead of `weight`, one after another; `in` is a multiple of 32
    int64_t num_parts;        // 0: none
    int32_t is_wide;          // outputs are float32, whatever the type of the inputs
    int32_t is_int8;          // rows are quantized to 8 bits: see int8_rows.h; there are parts
    float *maxima;  // of outputs that are float32, without a bias, in one part; or null: see blocks.h
} linear;

#define PARALLEL_PRODUCTS_FROM (1 << 17)  // products; fewer are done before the others have started
