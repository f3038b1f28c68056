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
// very low numbers to whole vectors. What is not finite makes all shares NaN. `is_taken`: room for a
// byte per expert.
static void choose(const experts *all, const float *logits, char *is_taken, int32_t *chosen,
                   float *shares) {
    const int64_t num = all->router.out;
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
int NAME(route)(const experts *all, const T *x, int32_t *chosen, float *shares, int64_t rows) {
    const int64_t num = all->router.out, padded = ceil_div(num, W) * W, k = all->top_k;
    T *logits = take((rows * num + W) * sizeof(T));
    if (!logits) return OUT_OF_MEMORY;
    int status = NAME(linear)(&all->router, x, logits, rows);
#pragma omp parallel if (rows * num * k >= PARALLEL_FROM)
    {
        float *const numbers = take(padded * sizeof *numbers + num);
        if (!numbers) note_shortage(&status);
#pragma omp for
        for (int64_t row = 0; row < rows; row++) {
            if (!numbers) continue;
            for (int64_t i = 0; i < num; i += W)
                store_f32(numbers + i, LOAD(logits + row * num + i));
            for (int64_t i = num; i < padded; i++) numbers[i] = -1e30f;
            choose(all, numbers, (char *)(numbers + padded), chosen + row * k, shares + row * k);
        }
        free(numbers);
    }
    free(logits);
    return status;
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
int NAME(mix)(const experts *all, const int32_t *chosen, const float *shares, const T *x, T *out,
              int64_t rows) {
    const int64_t num = all->router.out, k = all->top_k, in = all->router.in;
    const int64_t inner = all->down->in;
    int64_t *const ends = take_zeros((num + 1) * sizeof *ends);
    int64_t *const picks = take(rows * k * sizeof *picks);  // by expert; those of one by row
    float *const sums = take_zeros(rows * in * sizeof *sums);
    T *some = 0;
    int status = OUT_OF_MEMORY;
    int64_t most = 0;
    if (!ends || !picks || !sums) goto end;
    for (int64_t pick = 0; pick < rows * k; pick++) ends[chosen[pick] + 1]++;
    for (int64_t e = 0; e < num; e++) most = larger(most, ends[e + 1]), ends[e + 1] += ends[e];
    for (int64_t pick = 0; pick < rows * k; pick++) picks[ends[chosen[pick]]++] = pick;
    some = take(most * (in + 3 * inner) * sizeof(T));
    if (!some) goto end;
    status = DONE;
    T *const both = some + most * in, *const gated = both + most * 2 * inner;
    for (int64_t e = 0, first = 0; e < num; first = ends[e++]) {
        const int64_t *own = picks + first, n = ends[e] - first;
        if (!n) continue;
#pragma omp parallel for if (n * in >= PARALLEL_FROM)
        for (int64_t i = 0; i < n; i++) memcpy(some + i * in, x + own[i] / k * in, in * sizeof(T));
        status |= NAME(linear)(all->gate_up + e, some, both, n);
        NAME(activate)(all, both, gated, n, inner);
        status |= NAME(linear)(all->down + e, gated, some, n);
#pragma omp parallel for if (n * in >= PARALLEL_FROM)
        for (int64_t i = 0; i < n; i++) {
            float *to = sums + own[i] / k * in;
            for (int64_t j = 0; j < in; j += W)
                store_f32(to + j, multiply_add(splat(shares[own[i]]), LOAD(some + i * in + j),
                                               load_f32(to + j)));
        }
    }
    for (int64_t j = 0; j < rows * in; j += W) STORE(out + j, load_f32(sums + j));
end:
    free(some);
    free(sums);
    free(picks);
    free(ends);
    return status;
}

static int NAME(apply_experts)(const experts *all, const T *x, T *out, int64_t rows) {
    float *const shares = take(rows * all->top_k * (sizeof *shares + sizeof(int32_t)));
    if (!shares) return OUT_OF_MEMORY;
    int32_t *const chosen = (int32_t *)(shares + rows * all->top_k);
    int status = NAME(route)(all, x, chosen, shares, rows);
    if (status == DONE) status = NAME(mix)(all, chosen, shares, x, out, rows);
    free(shares);
    return status;
}
