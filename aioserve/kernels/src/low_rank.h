// What adapters add to products: of each of their rows a few narrow numbers, and of these a share of
// its outputs. Included once per element type: T, LOAD, STORE, NAME. Sums are float32, and of a row
// always in one order: no result depends on other rows or on threads.

#ifndef LOW_RANK
#define LOW_RANK
#define NARROW_BLOCK 256  // inputs at a time
#define ROWS_AT_ONCE (4 * MAX_ROWS)

typedef struct {
    const void *b;          // [out / panel][rank][panel], zeros at the end
    int64_t first, rank;    // of a row's narrow numbers
    int64_t column, out;    // the outputs that it adds to
} low_rank_piece;

typedef struct {
    const void *a;  // [ranks / W][in][W], zeros at the end; of a table [tokens][ranks]
    int64_t in, ranks;  // `ranks` a multiple of W, `in` of 16
    low_rank_piece pieces[3];
    int64_t num_pieces;  // 0: nothing is added here
} low_rank;

typedef struct {
    const low_rank *products;  // by place: of each layer qkv, output, gate_up, down; then the head
    const low_rank *table;     // of the embedding, or null
    const int64_t *rows;       // those of one adapter, ascending
    int64_t count;
} adapter_rows;

// The items of one call, before which group each begins.
typedef struct {
    const low_rank *product;
    const adapter_rows *group;
    float *narrow;  // [count][ranks]
    int64_t first_narrow, first_wide, panels;
} low_rank_work;

static const low_rank_work *find_work(const low_rank_work *work, int64_t count, int64_t item,
                                      int is_wide) {
    while (count > 1 && (is_wide ? work[count - 1].first_wide : work[count - 1].first_narrow) > item)
        count--;
    return work + count - 1;
}
#endif

// Narrow numbers of up to MAX_ROWS rows and W ranks: out [rows][W].
INLINE void NAME(narrow_tile)(int rows, const T *const *x, const T *a, int64_t in, float *out,
                              int64_t out_stride) {
    vf sums[MAX_ROWS][2];
    float wide[MAX_ROWS][NARROW_BLOCK] __attribute__((aligned(64)));
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = splat(0);
    for (int64_t start = 0; start < in; start += NARROW_BLOCK) {
        const int64_t n = smaller(NARROW_BLOCK, in - start);
        for (int r = 0; r < rows; r++)
            for (int64_t k = 0; k < n; k += W) store_f32(wide[r] + k, LOAD(x[r] + start + k));
        for (int64_t k = 0; k < n; k += 2) {
            vf even = LOAD(a + (start + k) * W), odd = LOAD(a + (start + k + 1) * W);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                sums[r][0] = multiply_add(splat_bits(wide[r] + k), even, sums[r][0]);
                sums[r][1] = multiply_add(splat_bits(wide[r] + k + 1), odd, sums[r][1]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) store_f32(out + r * out_stride, sums[r][0] + sums[r][1]);
}

// Up to MAX_ROWS rows of one panel: y [rows][count] += narrow . b; y of T, or of float if `is_wide`.
INLINE void NAME(widen_tile)(int rows, const float *narrow, int64_t stride, const T *b,
                             int64_t rank, char *const *y, int64_t count, int is_wide) {
    vf sums[MAX_ROWS][MAX_VECTORS];
    float whole[MAX_ROWS][PANEL];
    const int is_part = count < PANEL;
    const int64_t bytes = count * (is_wide ? sizeof(float) : sizeof(T));
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        const char *own = is_part ? memcpy(whole[r], y[r], bytes) : y[r];
#pragma GCC unroll 4
        for (int j = 0; j < MAX_VECTORS; j++)
            sums[r][j] = is_wide ? load_f32((const float *)own + j * W)
                                 : LOAD((const T *)own + j * W);
    }
    for (int64_t k = 0; k < rank; k++) {
        vf right[MAX_VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < MAX_VECTORS; j++) right[j] = LOAD(b + k * PANEL + j * W);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            vf left = splat_bits(narrow + r * stride + k);
#pragma GCC unroll 4
            for (int j = 0; j < MAX_VECTORS; j++)
                sums[r][j] = multiply_add(left, right[j], sums[r][j]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        char *own = is_part ? (char *)whole[r] : y[r];
#pragma GCC unroll 4
        for (int j = 0; j < MAX_VECTORS; j++)
            if (is_wide) store_f32((float *)own + j * W, sums[r][j]);
            else STORE((T *)own + j * W, sums[r][j]);
        if (is_part) memcpy(y[r], whole[r], bytes);
    }
}

#define ROW_CASES(call)                                                         \
    switch (rows) {                                                         \
        case 1: call(1); break;                                             \
        case 2: call(2); break;                                             \
        case 3: call(3); break;                                             \
        case 4: call(4); break;                                             \
        case 5: call(5); break;                                             \
        case 6: call(6); break;                                             \
    }

static __attribute__((noinline)) void NAME(narrow_rows)(int rows, const T *const *x, const T *a,
                                                        int64_t in, float *out, int64_t stride) {
#define NARROW(n) NAME(narrow_tile)(n, x, a, in, out, stride)
    ROW_CASES(NARROW)
#undef NARROW
}

static __attribute__((noinline)) void NAME(widen_narrow)(int rows, const float *narrow,
                                                         int64_t stride, const T *b, int64_t rank,
                                                         char *const *y, int64_t count,
                                                         int is_wide) {
#define WIDEN(n) NAME(widen_tile)(n, narrow, stride, b, rank, y, count, is_wide)
    ROW_CASES(WIDEN)
#undef WIDEN
}
#undef ROW_CASES

// A panel of ranks of some rows of one group.
static void NAME(narrow_item)(const low_rank_work *work, int64_t item, const T *x) {
    const low_rank *product = work->product;
    const int64_t panels = product->ranks / W, panel = item % panels;
    const int64_t begin = item / panels * ROWS_AT_ONCE;
    const int64_t end = smaller(begin + ROWS_AT_ONCE, work->group->count);
    const T *const a = (const T *)product->a + panel * product->in * W;
    for (int64_t row = begin; row < end; row += MAX_ROWS) {
        const int64_t count = smaller(MAX_ROWS, end - row);
        const T *rows[MAX_ROWS];
        for (int64_t r = 0; r < count; r++) rows[r] = x + work->group->rows[row + r] * product->in;
        NAME(narrow_rows)(count, rows, a, product->in,
                          work->narrow + row * product->ranks + panel * W, product->ranks);
    }
}

// A panel of outputs of some rows of one group.
static void NAME(wide_item)(const low_rank_work *work, int64_t item, void *y, int64_t y_stride,
                            int is_wide) {
    const low_rank *product = work->product;
    int64_t panel = item % work->panels;
    const low_rank_piece *piece = product->pieces;
    for (int64_t own; panel >= (own = ceil_div(piece->out, PANEL)); piece++) panel -= own;
    const int64_t begin = item / work->panels * ROWS_AT_ONCE;
    const int64_t end = smaller(begin + ROWS_AT_ONCE, work->group->count);
    const int64_t columns = smaller(PANEL, piece->out - panel * PANEL);
    const T *const b = (const T *)piece->b + panel * piece->rank * PANEL;
    for (int64_t row = begin; row < end; row += MAX_ROWS) {
        const int64_t count = smaller(MAX_ROWS, end - row);
        char *rows[MAX_ROWS];
        for (int64_t r = 0; r < count; r++)
            rows[r] = (char *)y
                      + (work->group->rows[row + r] * y_stride + piece->column + panel * PANEL)
                            * (is_wide ? sizeof(float) : sizeof(T));
        NAME(widen_narrow)(count, work->narrow + row * product->ranks + piece->first,
                           product->ranks, b, piece->rank, rows, columns, is_wide);
    }
}

// y [tokens][y_stride] += what the adapters of `groups` make of x, for the product at `place`; or of
// ids, for the embedding, if there is no x. y is of T, or of float if `is_wide`.
int NAME(add_low_rank)(const adapter_rows *groups, int64_t num_groups, int64_t place, const T *x,
                       const int64_t *ids, void *y, int64_t y_stride, int64_t is_wide) {
    low_rank_work *const work = take(num_groups * sizeof(low_rank_work));
    if (!work) return OUT_OF_MEMORY;
    int64_t count = 0, num_narrow = 0, num_wide = 0, numbers = 0, products = 0;
    for (int64_t g = 0; g < num_groups; g++) {
        const low_rank *product = x ? groups[g].products + place : groups[g].table;
        if (!product || !product->num_pieces) continue;
        low_rank_work one = {.product = product, .group = groups + g};
        for (int64_t p = 0; p < product->num_pieces; p++) {
            one.panels += ceil_div(product->pieces[p].out, PANEL);
            products += groups[g].count * product->pieces[p].rank * product->pieces[p].out;
        }
        const int64_t tiles = ceil_div(groups[g].count, ROWS_AT_ONCE);
        one.first_narrow = num_narrow, one.first_wide = num_wide;
        num_narrow += x ? tiles * (product->ranks / W) : 0;
        num_wide += tiles * one.panels;
        numbers += groups[g].count * product->ranks;
        products += x ? groups[g].count * product->ranks * product->in : 0;
        work[count++] = one;
    }
    float *const narrow = take(numbers * sizeof(float)), *next = narrow;
    if (!narrow) {
        free(work);
        return OUT_OF_MEMORY;
    }
    for (int64_t g = 0; g < count; g++) {
        const low_rank *product = work[g].product;
        work[g].narrow = next;
        if (!x)
            for (int64_t r = 0; r < work[g].group->count; r++)
                for (int64_t k = 0; k < product->ranks; k += W)
                    store_f32(next + r * product->ranks + k,
                              LOAD((const T *)product->a
                                   + ids[work[g].group->rows[r]] * product->ranks + k));
        next += work[g].group->count * product->ranks;
    }
#pragma omp parallel if (products >= PARALLEL_PRODUCTS_FROM)
    {
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < num_narrow; item++) {
            const low_rank_work *own = find_work(work, count, item, 0);
            NAME(narrow_item)(own, item - own->first_narrow, x);
        }
#pragma omp for schedule(dynamic) nowait
        for (int64_t item = 0; item < num_wide; item++) {
            const low_rank_work *own = find_work(work, count, item, 1);
            NAME(wide_item)(own, item - own->first_wide, y, y_stride, is_wide != 0);
        }
    }
    free(narrow);
    free(work);
    return DONE;
}
