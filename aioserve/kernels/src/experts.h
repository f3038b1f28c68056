// Layers of experts: a router gives each row some of them, and its share of each. Rows are grouped by
// expert, one product for all rows of one; no result depends on other rows or on threads. Included
// once per element type, after its kernels: T, LOAD, STORE, NAME.

#ifndef EXPERTS
#define EXPERTS
enum { SILU, GELU_TANH, CLAMPED };

typedef struct {
    linear router;                 // an output per expert
    const linear *gate_up, *down;  // of each expert
    int64_t top_k;
    int64_t of_all;  // a share is one of what all experts would get, else of what the chosen ones do
    int64_t activation;
    float alpha, limit;  // of CLAMPED
} experts;

// The experts of one row, the first of equal ones first, and its shares. `logits` are padded with
// very low numbers to whole vectors. What is not finite makes all shares NaN.
static void choose(const experts *all, const float *logits, int32_t *chosen, float *shares) {
    const int64_t num = all->router.out;
    char is_taken[num];
    memset(is_taken, 0, num);
    for (int64_t k = 0; k < all->top_k; k++) {
        int64_t best = -1;
        for (int64_t i = 0; i < num; i++)
            if (!is_taken[i] && (best < 0 || logits[i] > logits[best])) best = i;
        is_taken[best] = 1;
        chosen[k] = best;
        shares[k] = logits[best];
    }
    const float top = shares[0];
    vf total = {0}, invalid = {0};
    for (int64_t i = 0; i < num; i += W) {
        const vf v = load_f32(logits + i);
        invalid += v - v;
        if (all->of_all) total += exp_(v - top);
    }
    for (int64_t k = 0; k < all->top_k; k += W) {
        const int64_t n = smaller(W, all->top_k - k) * sizeof(float);
        vf v = splat(top - 88);
        memcpy(&v, shares + k, n);
        v = exp_(v - top);
        memcpy(shares + k, &v, n);
    }
    float whole = sum(total);
    for (int64_t k = 0; k < all->top_k && !all->of_all; k++) whole += shares[k];
    whole += sum(invalid);
    for (int64_t k = 0; k < all->top_k; k++) shares[k] /= whole;
}
#endif

// `chosen` and `shares` [rows, top_k] of x [rows, in], the largest share first.
void NAME(route)(const experts *all, const T *x, int32_t *chosen, float *shares, int64_t rows) {
    const int64_t num = all->router.out, padded = ceil_div(num, W) * W, k = all->top_k;
    T *logits = malloc((rows * num + W) * sizeof(T));
    NAME(linear)(&all->router, x, logits, rows);
#pragma omp parallel for if (rows * num * k >= PARALLEL_FROM)
    for (int64_t row = 0; row < rows; row++) {
        float numbers[padded];
        for (int64_t i = 0; i < num; i += W) store_f32(numbers + i, LOAD(logits + row * num + i));
        for (int64_t i = num; i < padded; i++) numbers[i] = -1e30f;
        choose(all, numbers, chosen + row * k, shares + row * k);
    }
    free(logits);
}

static void NAME(activate)(const experts *all, const T *x, T *out, int64_t rows, int64_t n) {
    if (all->activation == CLAMPED)
        NAME(clamped_swiglu)(x, out, rows, n, all->alpha, all->limit);
    else if (all->activation == GELU_TANH)
        NAME(gelu_tanh_and_mul)(x, out, rows, n);
    else
        NAME(silu_and_mul)(x, out, rows, n);
}

// out [rows, in] = what the chosen experts make of x, by shares; `out` may be x. Added up in float32,
// in the order of the experts.
void NAME(mix)(const experts *all, const int32_t *chosen, const float *shares, const T *x, T *out,
               int64_t rows) {
    const int64_t num = all->router.out, k = all->top_k, in = all->router.in;
    const int64_t inner = all->down->in;
    int64_t *ends = calloc(num + 1, sizeof *ends), most = 0;
    for (int64_t pick = 0; pick < rows * k; pick++) ends[chosen[pick] + 1]++;
    for (int64_t e = 0; e < num; e++) most = larger(most, ends[e + 1]), ends[e + 1] += ends[e];
    int64_t *picks = malloc(rows * k * sizeof *picks);  // by expert; those of one by row
    for (int64_t pick = 0; pick < rows * k; pick++) picks[ends[chosen[pick]]++] = pick;
    float *sums = calloc(rows * in, sizeof *sums);
    T *some = malloc(most * (in + 3 * inner) * sizeof(T));
    T *both = some + most * in, *gated = both + most * 2 * inner;
    for (int64_t e = 0, first = 0; e < num; first = ends[e++]) {
        const int64_t *own = picks + first, n = ends[e] - first;
        if (!n) continue;
#pragma omp parallel for if (n * in >= PARALLEL_FROM)
        for (int64_t i = 0; i < n; i++) memcpy(some + i * in, x + own[i] / k * in, in * sizeof(T));
        NAME(linear)(all->gate_up + e, some, both, n);
        NAME(activate)(all, both, gated, n, inner);
        NAME(linear)(all->down + e, gated, some, n);
#pragma omp parallel for if (n * in >= PARALLEL_FROM)
        for (int64_t i = 0; i < n; i++) {
            float *to = sums + own[i] / k * in;
            for (int64_t j = 0; j < in; j += W)
                store_f32(to + j, multiply_add(splat(shares[own[i]]), LOAD(some + i * in + j),
                                               load_f32(to + j)));
        }
    }
    for (int64_t j = 0; j < rows * in; j += W) STORE(out + j, load_f32(sums + j));
    free(some);
    free(sums);
    free(picks);
    free(ends);
}

static void NAME(apply_experts)(const experts *all, const T *x, T *out, int64_t rows) {
    float *shares = malloc(rows * all->top_k * (sizeof *shares + sizeof(int32_t)));
    int32_t *chosen = (int32_t *)(shares + rows * all->top_k);
    NAME(route)(all, x, chosen, shares, rows);
    NAME(mix)(all, chosen, shares, x, out, rows);
    free(shares);
}
