// Products of small matrices in registers. Included once per kind of lane: LANES, MULTIPLY_ADD. A
// lane of 32 bits is one float, or a pair of bfloat16 numbers where they have dot products.

// sums[r][j] += a[r][k] * b[k][j], for constant mr <= MAX_ROWS and nv <= MAX_VECTORS: in registers.
INLINE void LANES(product)(int mr, int nv, const float *a, int64_t a_stride, const float *b,
                          int64_t b_stride, int64_t n, vf sums[MAX_ROWS][MAX_VECTORS]) {
#pragma GCC unroll 4
    for (int64_t k = 0; k < n; k++) {
        vf right[MAX_VECTORS];
#pragma GCC unroll 8
        for (int j = 0; j < nv; j++) right[j] = load_f32(b + k * b_stride + j * W);
#pragma GCC unroll 8
        for (int r = 0; r < mr; r++) {
            vf left = splat_bits(a + r * a_stride + k);
#pragma GCC unroll 8
            for (int j = 0; j < nv; j++) sums[r][j] = MULTIPLY_ADD(sums[r][j], left, right[j]);
        }
    }
}

#ifndef PRODUCT_ALONE
// Columns [0, nv * W) of out = scale * out + a @ b.
INLINE void LANES(product_columns)(int mr, int nv, const float *a, int64_t a_stride, const float *b,
                                  int64_t b_stride, int64_t n, const float *scales, float *out,
                                  int64_t out_stride) {
    vf sums[MAX_ROWS][MAX_VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < mr; r++)
#pragma GCC unroll 8
        for (int j = 0; j < nv; j++)
            sums[r][j] = scales ? load_f32(out + r * out_stride + j * W) * scales[r] : splat(0);
    LANES(product)(mr, nv, a, a_stride, b, b_stride, n, sums);
#pragma GCC unroll 8
    for (int r = 0; r < mr; r++)
#pragma GCC unroll 8
        for (int j = 0; j < nv; j++) store_f32(out + r * out_stride + j * W, sums[r][j]);
}

// All `columns`, a multiple of W.
INLINE void LANES(product_rows)(int mr, const float *a, int64_t a_stride, const float *b,
                               int64_t b_stride, int64_t n, int64_t columns, const float *scales,
                               float *out, int64_t out_stride) {
    int64_t c = 0;
    for (; c + MAX_VECTORS * W <= columns; c += MAX_VECTORS * W)
        LANES(product_columns)(mr, MAX_VECTORS, a, a_stride, b + c, b_stride, n, scales, out + c,
                              out_stride);
    for (; c < columns; c += W)
        LANES(product_columns)(mr, 1, a, a_stride, b + c, b_stride, n, scales, out + c, out_stride);
}

// The same for 1 <= mr <= MAX_ROWS.
static __attribute__((noinline)) void LANES(multiply)(int mr, const float *a, int64_t a_stride,
                                                      const float *b, int64_t b_stride, int64_t n,
                                                      int64_t columns, const float *scales,
                                                      float *out, int64_t out_stride) {
#define CASE(rows)                                                                       \
    case rows:                                                                           \
        LANES(product_rows)(rows, a, a_stride, b, b_stride, n, columns, scales, out,     \
                            out_stride);                                                 \
        break;
    switch (mr) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
    }
#undef CASE
}
#endif
