// Checks every kernel of one built variant against loops over single numbers, in double.
//
//     cc -O2 -o check_kernels check_kernels.c -ldl -lm  # with shortage.c beside it
//     ./check_kernels .../_avx2.so .../_tokens_avx2.so
//
// For processors that have no torch at hand: it runs in an emulator. Knows the exported functions
// by name, and repeats their structs; knows nothing else about them. Prints what failed, then
// "N passed, N failed".
#include "shortage.c"
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef enum { F32, BF16, F16, TYPES } type;

static const char *const SUFFIXES[] = {"f32", "bf16", "f16"};
static const int SIZES[] = {4, 2, 2};
static const double ROUNDING[] = {0x1p-24, 0x1p-8, 0x1p-11};  // of one number, relative
static const double SMALLEST[] = {0, 0, 0x1p-25};             // half of the least step
#define SUMMING 4e-6  // of float32 sums in another order, relative to the sum of their sizes

// Numbers

static double value_of[TYPES][65536];  // of all numbers of two bytes

static void list_values(void) {
    for (uint32_t bits = 0; bits < 65536; bits++) {
        uint32_t single = bits << 16;
        float v;
        memcpy(&v, &single, sizeof v);
        value_of[BF16][bits] = v;
        int exponent = bits >> 10 & 31, fraction = bits & 1023;
        double half = exponent == 31 ? (fraction ? NAN : INFINITY)
                      : exponent     ? ldexp(1024 + fraction, exponent - 25)
                                     : ldexp(fraction, -24);
        value_of[F16][bits] = bits & 0x8000 ? -half : half;
    }
}

static double get(type t, const void *p, int64_t i) {
    return t == F32 ? ((const float *)p)[i] : value_of[t][((const uint16_t *)p)[i]];
}

// To nearest, ties to even.
static void put(type t, void *p, int64_t i, double v) {
    float single = v;
    if (t == F32) {
        ((float *)p)[i] = single;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &single, sizeof bits);
    if (t == BF16) {
        bits = isnan(v) ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    } else {
        uint32_t sign = bits >> 16 & 0x8000;
        int exponent;
        double size = fabs(v);
        frexp(size, &exponent);
        double step = ldexp(1, (exponent < -13 ? -13 : exponent) - 11);
        size = nearbyint(size / step) * step;
        if (isnan(v)) bits = 0x7e00;
        else if (size >= 65520) bits = 0x7c00 | sign;
        else if (size < 0x1p-14) bits = (uint32_t)ldexp(size, 24) | sign;
        else {
            frexp(size, &exponent);
            bits = (uint32_t)((exponent + 14) << 10) + ((uint32_t)ldexp(size, 11 - exponent) - 1024);
            bits |= sign;
        }
    }
    ((uint16_t *)p)[i] = bits;
}

static uint64_t state = 0x9e3779b97f4a7c15;

static double uniform(void) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (state >> 11) * 0x1p-53;
}

// Nearly: the sum of four, of variance 1. Half of all time went into sums of twelve.
static double normal(void) { return (uniform() + uniform() + uniform() + uniform() - 2) * sqrt(3); }

static double square(double x) { return x * x; }

static int64_t below(int64_t n) { return (int64_t)(uniform() * n); }

// What a test allocates lives until the next one.
static void *held[256];
static int num_held;

static void *allocate(int64_t bytes) {
    void *p = aligned_alloc(64, (bytes + 64 + 63) / 64 * 64);
    memset(p, 0x5a, bytes + 64);
    return held[num_held++] = p;
}

static void *random_numbers(type t, int64_t n, double scale) {
    void *p = allocate(n * SIZES[t]);
    for (int64_t i = 0; i < n; i++) put(t, p, i, normal() * scale);
    return p;
}

static void *copy(const void *p, int64_t bytes) { return memcpy(allocate(bytes), p, bytes); }

static int64_t *shuffled(int64_t n) {
    int64_t *p = allocate(n * sizeof *p);
    for (int64_t i = 0; i < n; i++) p[i] = i;
    for (int64_t i = n - 1; i > 0; i--) {
        int64_t j = below(i + 1), other = p[i];
        p[i] = p[j], p[j] = other;
    }
    return p;
}

// Judging

static int num_passed, num_failed;
static char name[200];  // of the case at hand
static int is_wrong;

static void begin(const char *format, ...) {
    while (num_held) free(held[--num_held]);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(name, sizeof name, format, arguments);
    va_end(arguments);
    is_wrong = 0;
}

static void end(void) {
    if (is_wrong) num_failed++;
    else num_passed++;
}

static void fail(const char *format, ...) {
    if (is_wrong++) return;  // one line for a case
    printf("FAILED %s: ", name);
    va_list arguments;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    puts("");
}

// `scale`: the sizes of what was summed up for this number; `roundings`: half steps of its type.
static void compare(type t, const char *what, int64_t place, double found, double expected,
                    double scale, double roundings) {
    double allowed = roundings * (ROUNDING[t] * fabs(expected) * 1.01 + SMALLEST[t]);
    allowed += SUMMING * scale;
    if (!(fabs(found - expected) <= allowed))
        fail("%s[%lld] is %.9g, not %.9g (+- %.2g)", what, (long long)place, found, expected,
             allowed);
}

static void *library;

static void *function(const char *base, type t) {
    char symbol[100];
    snprintf(symbol, sizeof symbol, "%s_%s", base, SUFFIXES[t]);
    void *found = dlsym(library, symbol);
    if (!found) {
        printf("FAILED %s: the library has no such function\n", symbol);
        num_failed++;
    }
    return found;
}

// With each of its allocations refused in turn, a call of `kernel` says so, and keeps none.
#define CHECK_SHORTAGES(kernel, call)                                                        \
    for (int nth = 1, refused = 1; refused; nth++) {                                         \
        refuse((const void *)(kernel), nth);                                                 \
        const int status = (call);                                                           \
        refused = was_refused();                                                             \
        if (refused != status) fail("allocation %d: %d, but it says %d", nth, refused, status); \
        if (refused < 0) break;                                                              \
    }

// Kernels

typedef void norm_function(const void *, const void *, float, void *, int64_t, int64_t);
typedef void add_norm_function(const void *, void *, const void *, float, void *, int64_t, int64_t);

static void check_norms(type t) {
    norm_function *rms_norm = function("rms_norm", t);
    add_norm_function *add_rms_norm = function("add_rms_norm", t);
    if (!rms_norm || !add_rms_norm) return;
    const int64_t sizes[][2] = {{1, 16}, {3, 48}, {7, 576}, {5, 1040}, {70, 512}};
    for (int i = 0; i < 5; i++)
        for (int has_residual = 0; has_residual < 2; has_residual++) {
            int64_t rows = sizes[i][0], n = sizes[i][1];
            begin("%srms_norm_%s [%d, %d]", has_residual ? "add_" : "", SUFFIXES[t], (int)rows,
                  (int)n);
            void *x = random_numbers(t, rows * n, 2), *weight = random_numbers(t, n, 1);
            void *residual = random_numbers(t, rows * n, 1), *out = allocate(rows * n * SIZES[t]);
            void *total = copy(x, rows * n * SIZES[t]);
            if (has_residual) {
                for (int64_t j = 0; j < rows * n; j++)
                    put(t, total, j, get(t, x, j) + get(t, residual, j));
                add_rms_norm(x, residual, weight, 1e-5f, out, rows, n);
                if (memcmp(residual, total, rows * n * SIZES[t])) fail("the residual is wrong");
            } else {
                rms_norm(x, weight, 1e-5f, out, rows, n);
            }
            for (int64_t row = 0; row < rows; row++) {
                double squares = 0;
                for (int64_t j = 0; j < n; j++) squares += square(get(t, total, row * n + j));
                for (int64_t j = 0; j < n; j++) {
                    double v = get(t, total, row * n + j) / sqrt(squares / n + 1e-5);
                    v *= get(t, weight, j);
                    compare(t, "out", row * n + j, get(t, out, row * n + j), v, fabs(v), 1);
                }
            }
            end();
        }
}

typedef void gate_function(const void *, void *, int64_t, int64_t);

static double silu(double x) { return x / (1 + exp(-x)); }

static double gelu_tanh(double x) {
    return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
}

static void check_gates(type t) {
    const char *const names[] = {"silu_and_mul", "gelu_tanh_and_mul"};
    for (int kind = 0; kind < 2; kind++) {
        gate_function *gate = function(names[kind], t);
        if (!gate) continue;
        const int64_t sizes[][2] = {{1, 16}, {3, 48}, {5, 1040}, {60, 512}};
        for (int i = 0; i < 4; i++) {
            int64_t rows = sizes[i][0], n = sizes[i][1];
            begin("%s_%s [%d, %d]", names[kind], SUFFIXES[t], (int)rows, (int)n);
            void *x = random_numbers(t, rows * 2 * n, 5), *out = allocate(rows * n * SIZES[t]);
            gate(x, out, rows, n);
            for (int64_t j = 0; j < rows * n; j++) {
                double first = get(t, x, j / n * 2 * n + j % n);
                double second = get(t, x, j / n * 2 * n + n + j % n);
                double v = (kind ? gelu_tanh(first) : silu(first)) * second;
                // far below zero 1 + tanh cancels
                compare(t, "out", j, get(t, out, j), v, fabs(v) + (kind ? fabs(second) : 0), 1);
            }
            end();
        }
    }
}

typedef void store_function(const void *, int64_t, int64_t, const int64_t *, void *, int64_t,
                            int64_t, int64_t, int64_t, int64_t);

// A row of codes and their scale, as numbers.
static void decode_row(const void *codes, int64_t n, double *out) {
    float scale;
    memcpy(&scale, (const char *)codes + n, sizeof scale);
    for (int64_t d = 0; d < n; d++) out[d] = (double)((const int8_t *)codes)[d] * scale;
}

// Whether a row of codes is `x`, where that is finite, to half a step of its largest number.
static int is_coded(type t, const void *codes, const void *x, int64_t at, int64_t n) {
    double found[512], most = 0;
    for (int64_t d = 0; d < n; d++)
        if (isfinite(get(t, x, at + d))) most = fmax(most, fabs(get(t, x, at + d)));
    decode_row(codes, n, found);
    for (int64_t d = 0; d < n; d++) {
        double v = get(t, x, at + d);
        if (!(fabs(found[d] - (isfinite(v) ? v : 0)) <= most / 253.99)) return 0;
    }
    return 1;
}

// AVX512's own rounding to bfloat16 takes numbers below 1e-38 for 0.
static int is_kept(type t, const void *cache, int64_t i, const void *x, int64_t j) {
    double v = get(t, x, j);
    if (!isfinite(v) || (fabs(v) < 0x1p-126 && get(t, cache, i) == 0)) return get(t, cache, i) == 0;
    return !memcmp((const char *)cache + i * SIZES[t], (const char *)x + j * SIZES[t], SIZES[t]);
}

static void check_store(type t) {
    store_function *store_kv = function("store_kv", t);
    if (!store_kv) return;
    const int64_t heads = 3, block_size = 5, blocks = 9;
    for (int64_t n = 16; n <= 80; n += 32) {
        begin("store_kv_%s heads of %d", SUFFIXES[t], (int)n);
        const int64_t tokens = 31, stride = heads * n + 7;
        void *x = random_numbers(t, tokens * stride, 1);
        put(t, x, 0, NAN), put(t, x, stride + 1, INFINITY), put(t, x, stride + 2, -INFINITY);
        int64_t *slots = shuffled(blocks * block_size);
        void *cache = allocate(blocks * heads * block_size * n * SIZES[t]);
        void *before = copy(cache, blocks * heads * block_size * n * SIZES[t]);
        store_kv(x, stride, n, slots, cache, tokens, heads, n, block_size, 0);
        for (int64_t i = 0; i < blocks * block_size; i++)
            for (int64_t h = 0; h < heads; h++)
                for (int64_t d = 0; d < n; d++) {
                    int64_t block = slots[i] / block_size, offset = slots[i] % block_size;
                    int64_t at = ((block * heads + h) * block_size + offset) * n + d;
                    if (i < tokens ? !is_kept(t, cache, at, x, i * stride + h * n + d)
                                   : !is_kept(t, cache, at, before, at))
                        fail("token %d, head %d, number %d", (int)i, (int)h, (int)d);
                }
        end();
    }
    for (int64_t n = 16; n <= 80; n += 32) {
        begin("store_kv_%s heads of %d as int8", SUFFIXES[t], (int)n);
        const int64_t tokens = 31, stride = heads * n, row = n + 4;
        void *x = random_numbers(t, tokens * stride, 1);
        put(t, x, 0, NAN), put(t, x, stride + 1, INFINITY), put(t, x, stride + 2, -INFINITY);
        for (int64_t d = 0; d < n; d++) put(t, x, 2 * stride + d, 0);
        int64_t *slots = shuffled(blocks * block_size);
        char *cache = allocate(blocks * heads * block_size * row);
        char *before = copy(cache, blocks * heads * block_size * row);
        store_kv(x, stride, n, slots, cache, tokens, heads, n, block_size, 1);
        for (int64_t i = 0; i < blocks * block_size; i++)
            for (int64_t h = 0; h < heads; h++) {
                int64_t block = slots[i] / block_size, offset = slots[i] % block_size;
                int64_t at = ((block * heads + h) * block_size + offset) * row;
                if (i < tokens ? !is_coded(t, cache + at, x, i * stride + h * n, n)
                               : memcmp(cache + at, before + at, row) != 0)
                    fail("token %d, head %d", (int)i, (int)h);
            }
        end();
    }
    if (t == F32) return;
    begin("store_kv_%s of all numbers that there are", SUFFIXES[t]);
    uint16_t *x = allocate(65536 * 2), *cache = allocate(65536 * 2);
    int64_t *slots = allocate(4096 * 8);
    for (int i = 0; i < 65536; i++) x[i] = i;
    for (int i = 0; i < 4096; i++) slots[i] = i;
    store_kv(x, 16, 16, slots, cache, 4096, 1, 16, 1, 0);
    for (int i = 0; i < 65536; i++)
        if (!is_kept(t, cache, i, x, i)) fail("%04x became %04x", x[i], cache[i]);
    end();
}

typedef void rope_function(void *, const float *, const int64_t *, const int64_t *, void *, void *,
                           int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                           const void *, const void *, float);

// One head as it should be after its norm, if any, and its turn.
static void turn(type t, const void *x, int64_t at, const void *norm, const float *cos_sin,
                 int64_t n, double *out, double *scale) {
    double squares = 0, values[512];
    for (int64_t d = 0; d < n; d++) squares += square(get(t, x, at + d));
    for (int64_t d = 0; d < n; d++) {
        values[d] = get(t, x, at + d);
        if (norm) values[d] *= get(t, norm, d) / sqrt(squares / n + 1e-5);
    }
    for (int64_t d = 0; d < n / 2; d++) {
        double a = values[d], b = values[n / 2 + d], c = cos_sin[d], s = cos_sin[n / 2 + d];
        out[d] = a * c - b * s, out[n / 2 + d] = b * c + a * s;
        scale[d] = scale[n / 2 + d] = fabs(a) + fabs(b);
    }
}

static void check_rope(type t) {
    rope_function *rope_store = function("rope_store", t);
    if (!rope_store) return;
    // tokens, heads, KV heads, sizes of keys and values, block size
    const int64_t cases[][6] = {{1, 9, 3, 64, 64, 16}, {5, 4, 4, 48, 80, 3},
                                {37, 6, 1, 16, 16, 7}, {2, 2, 1, 256, 64, 16}};
    for (int i = 0; i < 4; i++)
        for (int has_norms = 0; has_norms < 2; has_norms++) {
            const int64_t *c = cases[i], tokens = c[0], heads = c[1], kv_heads = c[2];
            const int64_t dim = c[3], value_dim = c[4], block_size = c[5], positions = 50;
            begin("rope_store_%s %d heads of %d, %s", SUFFIXES[t], (int)heads, (int)dim,
                  has_norms ? "norms" : "no norms");
            int64_t width = (heads + kv_heads) * dim + kv_heads * value_dim;
            void *x = random_numbers(t, tokens * width, 1);
            put(t, x, tokens * width - 1, NAN);
            void *qkv = copy(x, tokens * width * SIZES[t]);
            float *cos_sin = allocate(positions * dim * sizeof *cos_sin);
            for (int64_t p = 0; p < positions * dim / 2; p++) {
                float *row = cos_sin + p / (dim / 2) * dim + p % (dim / 2);
                double angle = 3 * normal();
                row[0] = cos(angle), row[dim / 2] = sin(angle);
            }
            int64_t blocks = tokens / block_size + 2, *slots = shuffled(blocks * block_size);
            int64_t *position = allocate(tokens * sizeof *position);
            for (int64_t j = 0; j < tokens; j++) position[j] = below(positions);
            void *keys = allocate(blocks * kv_heads * block_size * dim * SIZES[t]);
            void *values = allocate(blocks * kv_heads * block_size * value_dim * SIZES[t]);
            void *q_norm = has_norms ? random_numbers(t, dim, 1) : 0;
            void *k_norm = has_norms ? random_numbers(t, dim, 1) : 0;
            rope_store(qkv, cos_sin, position, slots, keys, values, tokens, heads, kv_heads, dim,
                       value_dim, block_size, 0, q_norm, k_norm, 1e-5f);
            for (int64_t j = 0; j < tokens; j++) {
                int64_t block = slots[j] / block_size, offset = slots[j] % block_size;
                for (int64_t h = 0; h < heads + kv_heads; h++) {
                    double out[512], scale[512];
                    int64_t kv_head = h - heads, slot;
                    turn(t, x, j * width + h * dim, h < heads ? q_norm : k_norm,
                         cos_sin + position[j] * dim, dim, out, scale);
                    slot = (block * kv_heads + kv_head) * block_size + offset;
                    for (int64_t d = 0; d < dim; d++) {
                        double found = h < heads ? get(t, qkv, j * width + h * dim + d)
                                                 : get(t, keys, slot * dim + d);
                        compare(t, h < heads ? "query" : "key", d, found, out[d], scale[d], 1);
                    }
                }
                for (int64_t h = 0; h < kv_heads; h++) {
                    int64_t slot = (block * kv_heads + h) * block_size + offset;
                    int64_t from = j * width + (heads + kv_heads) * dim + h * value_dim;
                    for (int64_t d = 0; d < value_dim; d++)
                        if (!is_kept(t, values, slot * value_dim + d, x, from + d))
                            fail("value %d of token %d", (int)d, (int)j);
                }
            }
            end();
        }
}

typedef int attention_function(const void *, int64_t, int64_t, void *, const void *, const void *,
                               const int32_t *, int64_t, const int64_t *, const int64_t *, int64_t,
                               int64_t, int64_t, int64_t, int64_t, int64_t, float, int64_t, float,
                               const float *, const int64_t *);

typedef struct {
    int64_t heads, kv_heads, key_dim, value_dim, block_size, window;
    float softcap;
    int has_sinks, has_images;
} attention_case;

// Of one token and head, which sees keys [first, end) of its row.
static void attend(type t, type kept, const attention_case *c, const void *query, int64_t at,
                   double scaling, const void *keys, const void *values, const int32_t *blocks, int64_t head,
                   int64_t first, int64_t end, const float *sinks, double *out, double *scale) {
    int64_t kv_head = head / (c->heads / c->kv_heads);
    double *scores = malloc((end - first) * sizeof *scores), most = -INFINITY, total = 0;
    for (int64_t k = first; k < end; k++) {
        int64_t slot = (blocks[k / c->block_size] * c->kv_heads + kv_head) * c->block_size;
        slot += k % c->block_size;
        double score = 0;
        for (int64_t d = 0; d < c->key_dim; d++)
            score += get(t, query, at + d) * get(kept, keys, slot * c->key_dim + d);
        score *= scaling;
        if (c->softcap > 0) score = c->softcap * tanh(score / c->softcap);
        scores[k - first] = score;
        most = score > most ? score : most;
    }
    if (sinks) most = sinks[head] > most ? sinks[head] : most, total = exp(sinks[head] - most);
    for (int64_t k = first; k < end; k++) total += scores[k - first] = exp(scores[k - first] - most);
    for (int64_t d = 0; d < c->value_dim; d++) out[d] = scale[d] = 0;
    for (int64_t k = first; k < end; k++) {
        int64_t slot = (blocks[k / c->block_size] * c->kv_heads + kv_head) * c->block_size;
        slot += k % c->block_size;
        for (int64_t d = 0; d < c->value_dim; d++) {
            double v = scores[k - first] / total * get(kept, values, slot * c->value_dim + d);
            out[d] += v, scale[d] += fabs(v);
        }
    }
    free(scores);
}

// The same by products of whole numbers, of K and V as codes: a query is rounded to 8 bits, and so are
// weights times the scales of their values, with one scale for 32 positions. Weights near a tie may be
// rounded the other way: `slack` is what that may be worth.
static void attend_rounded(type t, const attention_case *c, const void *query, int64_t at,
                           double scaling, const void *keys, const void *values,
                           const int32_t *blocks, int64_t head, int64_t first, int64_t end,
                           const float *sinks, double *out, double *scale, double *slack) {
    enum { TOGETHER = 32 };
    int64_t kv_head = head / (c->heads / c->kv_heads);
    double *weights = malloc((end - first) * sizeof *weights), top = -INFINITY, total = 0;
    float most = 0, inverse;
    for (int64_t d = 0; d < c->key_dim; d++) most = fmaxf(most, fabs(get(t, query, at + d)));
    inverse = 127 / most;
    for (int64_t k = first; k < end; k++) {
        int64_t slot = (blocks[k / c->block_size] * c->kv_heads + kv_head) * c->block_size;
        double key[512], score = 0;
        decode_row((const char *)keys + (slot + k % c->block_size) * (c->key_dim + 4), c->key_dim, key);
        for (int64_t d = 0; d < c->key_dim; d++)
            score += rintf((float)get(t, query, at + d) * inverse) * key[d];
        score *= most / 127. * scaling;
        if (c->softcap > 0) score = c->softcap * tanh(score / c->softcap);
        weights[k - first] = score;
        top = score > top ? score : top;
    }
    if (sinks) top = sinks[head] > top ? sinks[head] : top, total = exp(sinks[head] - top);
    for (int64_t k = first; k < end; k++) total += weights[k - first] = exp(weights[k - first] - top);
    for (int64_t d = 0; d < c->value_dim; d++) out[d] = scale[d] = slack[d] = 0;
    for (int64_t block = first / TOGETHER * TOGETHER; block < end; block += TOGETHER) {
        const int64_t from = block < first ? first : block;
        const int64_t to = block + TOGETHER < end ? block + TOGETHER : end;
        const char *rows[TOGETHER];
        float scales[TOGETHER];
        double step = 0;
        for (int64_t k = from; k < to; k++) {
            int64_t slot = (blocks[k / c->block_size] * c->kv_heads + kv_head) * c->block_size;
            rows[k - block] =
                (const char *)values + (slot + k % c->block_size) * (c->value_dim + 4);
            memcpy(scales + k - block, rows[k - block] + c->value_dim, sizeof *scales);
            step = fmax(step, weights[k - first] * scales[k - block] / 255);
        }
        for (int64_t k = from; k < to; k++) {
            const double steps = weights[k - first] * scales[k - block] / step;
            const int is_near = fabs(steps - floor(steps) - 0.5) < 5e-3;
            for (int64_t d = 0; d < c->value_dim; d++) {
                const double v = (int8_t)rows[k - block][d] * step / total;
                out[d] += rint(steps) * v, scale[d] += fabs(rint(steps) * v);
                slack[d] += is_near * fabs(v);
            }
        }
    }
    free(weights);
}

// `count` rows of random numbers as codes, and as the numbers that they stand for.
static void *random_codes(int64_t count, int64_t n, float **numbers) {
    char *codes = allocate(count * (n + 4));
    *numbers = allocate(count * n * sizeof **numbers);
    for (int64_t row = 0; row < count; row++, codes += n + 4) {
        double decoded[512];
        float scale = (0.5 + uniform()) / 40;
        for (int64_t d = 0; d < n; d++) codes[d] = (int8_t)(below(255) - 127);
        memcpy(codes + n, &scale, sizeof scale);
        decode_row(codes, n, decoded);
        for (int64_t d = 0; d < n; d++) (*numbers)[row * n + d] = decoded[d];
    }
    return codes - count * (n + 4);
}

enum { AS_THEY_ARE, AS_CODES, BY_BYTES };  // K and V, and how they are multiplied

static void check_attention(type t, int kind) {
    const char *const names[] = {"paged_attention", "paged_attention_int8", "paged_attention_bytes"};
    const int is_int8 = kind != AS_THEY_ARE;
    const int64_t *bytes_up_to = dlsym(library, "bytes_up_to");
    attention_function *paged_attention = function(names[kind], t);
    if (!paged_attention) return;
    const attention_case cases[] = {
        {6, 2, 64, 64, 16, 0, 0, 0, 0}, {6, 2, 64, 64, 5, 100, 0, 0, 0}, {4, 4, 16, 16, 1, 0, 3, 0, 0},
        {5, 1, 80, 96, 7, 0, 0, 1, 0},  {9, 3, 48, 32, 16, 7, 2, 1, 0},  {2, 1, 256, 128, 200, 0, 0, 0, 0},
        {3, 1, 32, 32, 16, 1, 0, 0, 0}, {7, 1, 64, 32, 16, 0, 0, 0, 0},   {6, 2, 64, 64, 5, -100, 0, 0, 0},
        {9, 3, 48, 32, 16, -7, 2, 1, 0}, {6, 2, 64, 64, 16, 0, 0, 0, 1}, {9, 3, 48, 32, 5, 7, 2, 1, 1},
    };
    // rows of (new tokens, all tokens): decodes, short and long, chunks, and a prompt
    const int64_t rows[][2] = {{1, 1}, {1, 70}, {20, 20}, {2, 530}, {17, 51}, {1, 16}};
    enum { ROWS = sizeof rows / sizeof *rows };
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        const attention_case *c = cases + i;
        begin("%s_%s %d heads for %d of %d, %d; blocks of %d%s%s%s%s", names[kind], SUFFIXES[t],
              (int)c->heads, (int)c->kv_heads, (int)c->key_dim, (int)c->value_dim,
              (int)c->block_size, c->window > 0 ? ", window" : c->window ? ", chunks" : "",
              c->softcap > 0 ? ", soft cap" : "", c->has_sinks ? ", sinks" : "",
              c->has_images ? ", images" : "");
        int64_t tokens = 0, width = 0, starts[ROWS + 1], lengths[ROWS];
        for (int r = 0; r < ROWS; r++) {
            starts[r] = tokens, lengths[r] = rows[r][1], tokens += rows[r][0];
            int64_t blocks = (lengths[r] + c->block_size - 1) / c->block_size;
            width = blocks > width ? blocks : width;
        }
        starts[ROWS] = tokens;
        int64_t blocks = width * ROWS, *order = shuffled(blocks);
        int32_t *table = allocate(blocks * sizeof *table);
        for (int64_t b = 0; b < blocks; b++) table[b] = order[b];
        int64_t slots = blocks * c->kv_heads * c->block_size;
        float *numbers[2];  // of codes
        void *keys = is_int8 ? random_codes(slots, c->key_dim, numbers)
                             : random_numbers(t, slots * c->key_dim, 1);
        void *values = is_int8 ? random_codes(slots, c->value_dim, numbers + 1)
                               : random_numbers(t, slots * c->value_dim, 1);
        // what no row may read: others may be writing there
        for (int r = 0; r < ROWS; r++)
            for (int64_t k = lengths[r]; k < width * c->block_size; k++)
                for (int64_t h = 0; h < c->kv_heads; h++) {
                    int64_t slot = table[r * width + k / c->block_size] * c->kv_heads + h;
                    slot = slot * c->block_size + k % c->block_size;
                    if (is_int8) {  // NaN, as a scale
                        memset((char *)keys + slot * (c->key_dim + 4) + c->key_dim, 0xff, 4);
                        memset((char *)values + slot * (c->value_dim + 4) + c->value_dim, 0xff, 4);
                        continue;
                    }
                    for (int64_t d = 0; d < c->key_dim; d++) put(t, keys, slot * c->key_dim + d, NAN);
                    for (int64_t d = 0; d < c->value_dim; d++)
                        put(t, values, slot * c->value_dim + d, NAN);
                }
        int64_t *ends = allocate(tokens * sizeof *ends);
        for (int r = 0; r < ROWS; r++)
            for (int64_t n = rows[r][0], token = 0; token < n; token++) {
                int is_of_image = c->has_images && token >= n / 4 && token < n - n / 8;
                int64_t end = is_of_image ? n - n / 8 : token + 1;
                ends[starts[r] + token] = lengths[r] - n + end;
            }
        int64_t stride = c->heads * c->key_dim + 16;
        void *query = random_numbers(t, tokens * stride, 1);
        void *out = allocate(tokens * c->heads * c->value_dim * SIZES[t]);
        float *sinks = allocate(c->heads * sizeof *sinks), scaling = 1 / sqrtf(c->key_dim);
        for (int64_t h = 0; h < c->heads; h++) sinks[h] = normal();
        CHECK_SHORTAGES(paged_attention,
            paged_attention(query, stride, c->key_dim, out, keys, values, table, width, starts,
                            lengths, ROWS, c->heads, c->kv_heads, c->key_dim, c->value_dim,
                            c->block_size, scaling, c->window, c->softcap, c->has_sinks ? sinks : 0,
                            c->has_images ? ends : 0))
        for (int r = 0; r < ROWS; r++)
            for (int64_t token = 0; token < rows[r][0]; token++)
                for (int64_t h = 0; h < c->heads; h++) {
                    double expected[512], scale[512], slack[512] = {0};
                    int64_t last = lengths[r] - rows[r][0] + token + 1;
                    int64_t first = c->window > 0 && last > c->window ? last - c->window : 0;
                    if (c->window < 0) first = (last - 1) / -c->window * -c->window;
                    const int64_t place = (starts[r] + token) * stride + h * c->key_dim;
                    const int by_bytes = kind == BY_BYTES && (t != BF16 || rows[r][0] <= *bytes_up_to);
                    if (by_bytes)
                        attend_rounded(t, c, query, place, scaling, keys, values,
                                       table + r * width, h, first, ends[starts[r] + token],
                                       c->has_sinks ? sinks : 0, expected, scale, slack);
                    else attend(t, is_int8 ? F32 : t, c, query, place, scaling,
                           is_int8 ? numbers[0] : keys, is_int8 ? numbers[1] : values, table + r * width, h, first,
                           ends[starts[r] + token], c->has_sinks ? sinks : 0,
                           expected, scale);
                    for (int64_t d = 0; d < c->value_dim; d++) {
                        int64_t at = ((starts[r] + token) * c->heads + h) * c->value_dim + d;
                        // weights of keys may be rounded as the result is
                        double more = t == BF16 ? ROUNDING[t] * scale[d] / SUMMING : 0;
                        if (by_bytes) more = 2 * scale[d] + slack[d] / SUMMING;
                        compare(t, "out", at, get(t, out, at), expected[d], scale[d] + more, 1);
                    }
                }
        end();
    }
}

// Products and whole passes

typedef struct {
    const uint8_t *panels;
    int64_t out, bits, group, per_super, has_offset, zero, panel_bytes;
} block_part;

typedef struct {
    const void *weight, *bias;
    int64_t in, out;
    const block_part *parts;
    int64_t num_parts;
    int32_t is_wide, is_int8;
    float *maxima;
} linear;

typedef int linear_function(const linear *, const void *, void *, int64_t);

// [out / panel][in / depth][panel][depth], zeros at the end.
static linear pack(const int64_t *panel, type t, const void *weight, const void *bias, int64_t in,
                   int64_t out) {
    int64_t panels = (out + panel[0] - 1) / panel[0], padded = panels * panel[0];
    char *packed = allocate(padded * in * SIZES[t]), *padded_bias = allocate(padded * SIZES[t]);
    memset(packed, 0, padded * in * SIZES[t]);
    memset(padded_bias, 0, padded * SIZES[t]);
    for (int64_t o = 0; o < out; o++)
        for (int64_t i = 0; i < in; i++) {
            int64_t at = (o / panel[0] * (in / panel[1]) + i / panel[1]) * panel[0] + o % panel[0];
            memcpy(packed + (at * panel[1] + i % panel[1]) * SIZES[t],
                   (const char *)weight + (o * in + i) * SIZES[t], SIZES[t]);
        }
    if (bias) memcpy(padded_bias, bias, out * SIZES[t]);
    return (linear){packed, bias ? padded_bias : 0, in, out, 0, 0, 0, 0, 0};
}

static void check_linear(type t) {
    linear_function *product = function("linear", t);
    const int64_t *panel = function("panel", t), *lanes = dlsym(library, "lanes");
    if (!product || !panel || !lanes) return;
    const int64_t sizes[][3] = {{16, 1, 1},   {48, 70, 2},   {144, 129, 3}, {272, 65, 6},
                                {16, 200, 7}, {272, 129, 4}, {528, 33, 24}, {272, 67, 25},
                                {48, 70, 201}, {784, 70, 40}, {16400, 1, 33}, {1008, 630, 530}};
    for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int kind = 0; kind < 4; kind++) {
            if (sizes[i][2] > 500 && (t != BF16 || kind % 3)) continue;  // groups of panels: panel_tiles.h
            const int has_bias = kind % 2, is_wide = kind / 2;
            const type to = is_wide ? F32 : t;
            int64_t in = sizes[i][0], out = sizes[i][1], rows = sizes[i][2];
            begin("linear_%s %d rows, %d to %d%s%s", SUFFIXES[t], (int)rows, (int)in, (int)out,
                  has_bias ? ", bias" : "", is_wide ? ", wide" : "");
            void *weight = random_numbers(t, out * in, 0.3), *x = random_numbers(t, rows * in, 1);
            void *bias = has_bias ? random_numbers(t, out, 1) : 0;
            char *y = allocate((rows * out + 64) * SIZES[to]), *row = allocate(out * SIZES[to]);
            linear layer = pack(panel, t, weight, bias, in, out);
            layer.is_wide = is_wide;
            const int64_t noted = 2 * *lanes, units = (out + noted - 1) / noted;
            float *maxima = allocate((units * rows + 64) * sizeof *maxima);
            if (to == F32 && !has_bias) layer.maxima = maxima;
            CHECK_SHORTAGES(product, product(&layer, x, y, rows))
            for (int64_t j = 0; layer.maxima && j < units * rows; j++) {
                const float *own = (float *)y + j % rows * out + j / rows * noted;
                float most = *own;
                for (int64_t k = 1; k < noted && j / rows * noted + k < out; k++)
                    most = fmaxf(most, own[k]);
                if (maxima[j] != most) fail("maximum %d is %g, not %g", (int)j, maxima[j], most);
            }
            for (int64_t j = 0; j < 64 * 4; j++)
                if (((char *)(maxima + units * rows))[j] != 0x5a) fail("maxima beyond their end");
            for (int64_t j = 0; j < rows * out; j++) {
                double v = has_bias ? get(t, bias, j % out) : 0, scale = fabs(v);
                for (int64_t k = 0; k < in; k++) {
                    double term = get(t, x, j / out * in + k) * get(t, weight, j % out * in + k);
                    v += term, scale += fabs(term);
                }
                compare(to, "out", j, get(to, y, j), v, scale, 1);
            }
            for (int64_t j = 0; j < 64 * SIZES[to]; j++)
                if (y[rows * out * SIZES[to] + j] != 0x5a) fail("it wrote beyond its end");
            product(&layer, (char *)x + (rows - 1) * in * SIZES[t], row, 1);
            if (memcmp(row, y + (rows - 1) * out * SIZES[to], out * SIZES[to]))
                fail("a row alone has other bits");
            end();
        }
}

typedef struct {
    const void *a;
    int64_t in, ranks;
    struct {
        const void *b;
        int64_t first, rank, column, out;
    } pieces[3];
    int64_t num_pieces;
} low_rank;

typedef struct {
    const low_rank *products, *table;
    const int64_t *rows;
    int64_t count;
} adapter_rows;

// `matrix` [n][k] as [n / size][k][size], zeros at the end.
static void *panels_of(type t, const void *matrix, int64_t n, int64_t k, int64_t size) {
    void *packed = allocate((n + size) / size * size * k * SIZES[t]);
    memset(packed, 0, (n + size) / size * size * k * SIZES[t]);
    for (int64_t i = 0; i < n * k; i++)
        memcpy((char *)packed + (i / k / size * size * k + i % k * size + i / k % size) * SIZES[t],
               (const char *)matrix + i * SIZES[t], SIZES[t]);
    return packed;
}

static void check_low_rank(type t) {
    int (*add)(const adapter_rows *, int64_t, int64_t, const void *, const int64_t *, void *,
               int64_t, int64_t) = function("add_low_rank", t);
    const int64_t *panel = function("panel", t), *lanes = dlsym(library, "lanes");
    if (!add || !panel || !lanes) return;
    enum { IN = 272, OUT = 150, ROWS = 40, RANK = 17 };
    for (int kind = 0; kind < 3; kind++) {
        const int is_table = kind == 1, is_wide = kind == 2;
        const type to = is_wide ? F32 : t;
        begin("add_low_rank_%s%s", SUFFIXES[t],
              is_table ? ", an embedding" : is_wide ? ", wide" : "");
        void *x = random_numbers(t, ROWS * IN, 1), *y = random_numbers(to, ROWS * OUT, 1);
        void *before = copy(y, ROWS * OUT * SIZES[to]);
        int64_t *ids = shuffled(ROWS), rows[2][ROWS], counts[2] = {0, 0};
        low_rank products[2][2] = {0};
        void *as[2], *bs[2];
        for (int g = 0; g < 2; g++) {  // a group of many rows, and one of a few
            const int64_t ranks = (RANK + *lanes - 1) / *lanes * *lanes;
            const int64_t wide = is_table ? ROWS : IN;
            as[g] = random_numbers(t, RANK * wide, 0.2), bs[g] = random_numbers(t, OUT * RANK, 0.2);
            void *a = is_table ? 0 : panels_of(t, as[g], RANK, IN, *lanes);
            if (is_table) {  // [tokens][ranks]
                memset(a = allocate(ROWS * ranks * SIZES[t]), 0, ROWS * ranks * SIZES[t]);
                for (int64_t i = 0; i < RANK * ROWS; i++)
                    memcpy((char *)a + (i % ROWS * ranks + i / ROWS) * SIZES[t],
                           (char *)as[g] + i * SIZES[t], SIZES[t]);
            }
            products[g][1] = (low_rank){a, IN, ranks, .num_pieces = 1};
            products[g][1].pieces[0].b = panels_of(t, bs[g], OUT - 1, RANK, panel[0]);
            products[g][1].pieces[0].rank = RANK, products[g][1].pieces[0].out = OUT - 1;
            products[g][1].pieces[0].column = 1;
        }
        for (int64_t r = 0; r < ROWS; r++)
            if (r % 8) rows[r % 8 > 5][counts[r % 8 > 5]++] = r;
        adapter_rows groups[2];
        for (int g = 0; g < 2; g++)
            groups[g] = (adapter_rows){products[g], products[g] + 1, rows[g], counts[g]};
        if (!is_table) add(groups, 2, 0, x, 0, y, OUT, is_wide);  // a place where nothing is added
        add(groups, 2, 1, is_table ? 0 : x, ids, y, OUT, is_wide);
        for (int64_t r = 0; r < ROWS; r++) {
            const int g = r % 8 > 5;
            double narrow[RANK], sizes[RANK];
            for (int64_t k = 0; k < RANK; k++) {
                narrow[k] = is_table ? get(t, as[g], k * ROWS + ids[r]) : 0;
                sizes[k] = fabs(narrow[k]);
                for (int64_t i = 0; i < (is_table ? 0 : IN); i++) {
                    double term = get(t, x, r * IN + i) * get(t, as[g], k * IN + i);
                    narrow[k] += term, sizes[k] += fabs(term);
                }
            }
            for (int64_t o = 0; o < OUT; o++) {
                double v = get(to, before, r * OUT + o), scale = fabs(v);
                for (int64_t k = 0; k < (r % 8 && o ? RANK : 0); k++) {
                    double b = get(t, bs[g], (o - 1) * RANK + k);
                    v += narrow[k] * b, scale += sizes[k] * fabs(b);
                }
                compare(to, "out", r * OUT + o, get(to, y, r * OUT + o), v, scale, 1);
            }
        }
        CHECK_SHORTAGES(add, add(groups, 2, 1, is_table ? 0 : x, ids, y, OUT, is_wide))
        end();
    }
}

// A random part of a weight in blocks; its numbers go to `plain` [out][in].
static block_part random_part(int64_t panel, int64_t in, block_part part, float *plain) {
    const int64_t kinds = 1 + part.has_offset, panels = (part.out + panel - 1) / panel;
    const int64_t groups = in / part.group, per_super = part.per_super, held = 32 / part.bits;
    const int64_t scale_bytes = kinds * panel * (per_super ? 1 : 2);
    const int64_t group_bytes = scale_bytes + part.group * panel / 8 * part.bits;
    const int64_t head = per_super ? kinds * 2 * panel : 0;
    part.panel_bytes = groups * group_bytes + (per_super ? groups / per_super * head : 0);
    uint8_t *bytes = allocate(panels * part.panel_bytes);
    for (int64_t i = 0; i < panels * part.panel_bytes; i++) bytes[i] = below(256);
    for (int64_t o = 0; o < panels * panel; o++)
        for (int64_t g = 0; g < groups; g++) {
            const int64_t place = o % panel, inner = per_super ? g % per_super : 0;
            uint8_t *own = bytes + o / panel * part.panel_bytes + g * group_bytes;
            if (per_super) own += (g / per_super + 1) * head;
            uint8_t *halves = per_super ? own - inner * group_bytes - head : own;
            double scales[2];
            for (int64_t kind = 0; kind < kinds; kind++, halves += 2 * panel) {
                if (inner == 0) put(F16, halves, place, 0.01 * normal());
                scales[kind] = get(F16, halves, place);
                if (per_super) scales[kind] *= (int8_t)own[kind * panel + place];
            }
            if (o >= part.out) continue;
            for (int64_t i = 0; i < part.group; i++) {
                uint32_t codes;  // of `held` inputs; bytes have those of inputs 0, 2, 1 and 3
                memcpy(&codes, own + scale_bytes + (i / held * panel + place) * 4, 4);
                const int byte = i % 4 / 2 + i % 2 * 2;
                const int from = 8 * byte + (part.bits == 4 ? i % 8 / 4 * 4 : 0);
                const int code = codes >> from & ((1 << part.bits) - 1);
                plain[o * in + g * part.group + i] =
                    (code - part.zero) * scales[0] + (part.has_offset ? scales[1] : 0);
            }
        }
    part.panels = bytes;
    return part;
}

// Rows as products with weights in blocks take them: whole numbers with a scale for 32 inputs, unless
// they are kept.
static double *whole_rows(type t, const void *x, int64_t count, int are_kept) {
    double *rows = allocate(count * sizeof *rows);
    for (int64_t i = 0; i < count; i += 32) {
        double top = 0;
        for (int64_t k = i; k < i + 32; k++) top = fmax(top, fabs(rows[k] = get(t, x, k)));
        if (t == F32 || are_kept || top == 0) continue;
        const double step = ldexp(1, ilogb(top) - 14);
        for (int64_t k = i; k < i + 32; k++) rows[k] = nearbyint(rows[k] / step) * step;
    }
    return rows;
}

// Rows quantized to 8 bits, with a scale for 32 inputs.
static double *int8_rows(type t, const void *x, int64_t count) {
    double *rows = allocate(count * sizeof *rows);
    for (int64_t i = 0; i < count; i += 32) {
        float top = 0;
        for (int64_t k = i; k < i + 32; k++) top = fmaxf(top, fabs(rows[k] = get(t, x, k)));
        const float scale = top / 127.f, inverse = 127.f / top;
        for (int64_t k = i; top && k < i + 32; k++)
            rows[k] = nearbyintf((float)rows[k] * inverse) * (double)scale;
    }
    return rows;
}

static void check_blocks(type t, int is_int8) {
    const int64_t *rounded_from = dlsym(library, "rounded_from");
    const int64_t *kept_from = dlsym(library, "kept_from");
    linear_function *product = function("linear", t);
    const int64_t *panel = function("panel", t);
    int (*embed)(const linear *, const int64_t *, void *, int64_t) = function("embed", t);
    if (!product || !panel || !embed) return;
    const block_part kinds[] = {{.bits = 4, .group = 32, .zero = 8},
                                {.bits = 4, .group = 32, .has_offset = 1},
                                {.bits = 8, .group = 32, .zero = 128},
                                {.bits = 4, .group = 128, .has_offset = 1, .zero = 3},
                                {.bits = 4, .group = 32, .per_super = 8, .has_offset = 1},
                                {.bits = 8, .group = 16, .per_super = 16, .zero = 128}};
    enum { KINDS = sizeof kinds / sizeof *kinds };
    const int64_t rows[] = {1, 3, 5, 6, 7, 16, 40, 100, 530}, in = 256;
    for (unsigned kind = 0; kind < KINDS; kind++)
        for (unsigned i = 0; i < sizeof rows / sizeof *rows; i++) {
            const int is_many = rows[i] > 100;  // of groups of panels: panel_tiles.h
            if (is_many && (t != BF16 || is_int8 || kind > 1)) continue;
            const int64_t outs[] = {37, is_many ? 560 : 70}, out = outs[0] + outs[1];
            begin("linear_%s in blocks, kind %d, %d rows%s", SUFFIXES[t], (int)kind, (int)rows[i],
                  is_int8 ? " of int8" : "");
            block_part parts[2];
            float *plain = allocate(out * in * sizeof *plain);
            for (int p = 0; p < 2; p++) {
                block_part part = kinds[(kind + p) % KINDS];
                part.out = outs[p];
                parts[p] = random_part(panel[0], in, part, plain + p * outs[0] * in);
            }
            void *x = random_numbers(t, rows[i] * in, 1);
            put(t, x, 3, 40), put(t, x, in - 5, 1e-3);
            const int is_rounded = t == BF16 && rows[i] >= *rounded_from;
            const int is_kept = t == BF16 && rows[i] >= *kept_from;
            const double *whole = is_int8 && !is_rounded ? int8_rows(t, x, rows[i] * in)
                                          : whole_rows(t, x, rows[i] * in, is_kept);
            void *bias = random_numbers(t, out + panel[0], 1);
            const int is_wide = i % 2;
            const type to = is_wide ? F32 : t;
            char *y = allocate((rows[i] * out + 64) * SIZES[to]), *row = allocate(in * SIZES[t]);
            linear layer = {0, bias, in, out, parts, 2, is_wide, is_int8, 0};
            CHECK_SHORTAGES(product, product(&layer, x, y, rows[i]))
            for (int64_t j = 0; j < rows[i] * out; j++) {
                double v = get(t, bias, j % out), scale = fabs(v);
                for (int64_t k = 0; k < in; k++) {
                    double weight = plain[j % out * in + k];
                    uint16_t rounded;
                    if (is_rounded) put(BF16, &rounded, 0, weight), weight = get(BF16, &rounded, 0);
                    const double term = whole[j / out * in + k] * weight;
                    v += term, scale += fabs(term);
                }
                compare(to, "out", j, get(to, y, j), v, scale, 1);
            }
            for (int64_t j = 0; j < 64 * SIZES[to]; j++)
                if (y[rows[i] * out * SIZES[to] + j] != 0x5a) fail("it wrote beyond its end");
            const int64_t id = below(out);
            CHECK_SHORTAGES(embed, embed(&layer, &id, row, 1))
            for (int64_t k = 0; k < in; k++) {
                const double weight = plain[id * in + k];
                compare(t, "row", k, get(t, row, k), weight, fabs(weight), 1);
            }
            end();
        }
}

typedef struct {
    linear qkv, output, gate_up, down;
    const void *experts;
    const void *input_norm, *post_norm, *q_norm, *k_norm;
    const float *cos_sin, *sinks;
    void *key_cache, *value_cache;
    int64_t q_heads, kv_heads, head_dim, block_size, window, in_windows, is_gelu, is_int8, in_bytes;
    float input_eps, post_eps, head_eps, scaling, softcap;
} decoder_layer;

typedef struct {
    const void *embedding;
    const linear *table;
    const decoder_layer *layers;
    const void *norm;
    linear head;
    int64_t num_layers, hidden, wide;
    float eps;
    void (*add_up)(void *, int64_t);
} decoder;

typedef struct {
    const int64_t *input_ids, *positions, *slots, *query_start_loc, *seq_lens, *sampling;
    const int32_t *block_table;
    const int64_t *window_slots;
    const int32_t *window_table;
    int64_t tokens, rows, table_width, num_sampling;
    const void *adapters, *sampling_adapters;
    int64_t num_adapters, num_sampling_adapters;
    const int64_t *tap_layers;
    void *taps;
    int64_t num_taps;
} decoder_step;

typedef int decode_function(const decoder *, const decoder_step *, void *, void *);

// The same weights as they were before they were packed.
typedef struct {
    const void *weights[4], *biases[4];
} plain_layer;

enum { QKV, OUTPUT, GATE_UP, DOWN };

static void multiply(type t, const void *weight, const void *bias, int64_t in, int64_t out,
                     const void *x, void *y, int64_t rows) {
    for (int64_t j = 0; j < rows * out; j++) {
        double v = bias ? get(t, bias, j % out) : 0;
        for (int64_t k = 0; k < in; k++)
            v += get(t, x, j / out * in + k) * get(t, weight, j % out * in + k);
        put(t, y, j, v);
    }
}

static void normalize(type t, const void *x, const void *weight, int64_t n, void *y, int64_t rows) {
    for (int64_t row = 0; row < rows; row++) {
        double squares = 0;
        for (int64_t j = 0; j < n; j++) squares += square(get(t, x, row * n + j));
        for (int64_t j = 0; j < n; j++)
            put(t, y, row * n + j, get(t, x, row * n + j) / sqrt(squares / n + 1e-5) *
                                       get(t, weight, j));
    }
}

// All that follows the embedding, one operation at a time, on `residual` [tokens, hidden] and on
// caches that are this function's own.
static void pass(type t, const decoder *model, const plain_layer *plain, const decoder_step *step,
                 void *residual, void *const *keys, void *const *values) {
    const int64_t tokens = step->tokens, hidden = model->hidden;
    void *normed = allocate(tokens * hidden * SIZES[t]), *added = allocate(tokens * hidden * SIZES[t]);
    void *wide = allocate(tokens * model->wide * SIZES[t]);
    void *narrow = allocate(tokens * model->wide * SIZES[t]);
    for (int64_t i = 0; i < model->num_layers; i++) {
        const decoder_layer *layer = model->layers + i;
        const int64_t dim = layer->head_dim, heads = layer->q_heads, kv_heads = layer->kv_heads;
        const int64_t width = layer->qkv.out, inner = layer->down.in;
        const int64_t *slots = layer->in_windows ? step->window_slots : step->slots;
        const int32_t *table = layer->in_windows ? step->window_table : step->block_table;
        const attention_case c = {heads, kv_heads, dim, dim, layer->block_size,
                                  layer->window, layer->softcap, 0, 0};
        normalize(t, residual, layer->input_norm, hidden, normed, tokens);
        multiply(t, plain[i].weights[QKV], plain[i].biases[QKV], hidden, width, normed, wide, tokens);
        for (int64_t token = 0; token < tokens; token++)
            for (int64_t h = 0; h < heads + 2 * kv_heads; h++) {
                double out[512], scale[512];
                int64_t at = token * width + h * dim, slot = slots[token];
                slot = (slot / layer->block_size * kv_heads + (h - heads) % kv_heads) *
                           layer->block_size + slot % layer->block_size;
                if (h < heads + kv_heads) {
                    turn(t, wide, at, h < heads ? layer->q_norm : layer->k_norm,
                         layer->cos_sin + step->positions[token] * dim, dim, out, scale);
                    for (int64_t d = 0; d < dim; d++) put(t, wide, at + d, out[d]);
                }
                for (int64_t d = 0; h >= heads && d < dim; d++)
                    put(t, (h < heads + kv_heads ? keys : values)[i], slot * dim + d,
                        get(t, wide, at + d));
            }
        for (int64_t row = 0; row < step->rows; row++)
            for (int64_t token = step->query_start_loc[row];
                 token < step->query_start_loc[row + 1]; token++)
                for (int64_t h = 0; h < heads; h++) {
                    double out[512], scale[512];
                    int64_t last = step->seq_lens[row] - (step->query_start_loc[row + 1] - token) + 1;
                    int64_t first = c.window && last > c.window ? last - c.window : 0;
                    attend(t, t, &c, wide, token * width + h * dim, layer->scaling, keys[i], values[i],
                           table + row * step->table_width, h, first, last, 0, out,
                           scale);
                    for (int64_t d = 0; d < dim; d++)
                        put(t, narrow, (token * heads + h) * dim + d, out[d]);
                }
        for (int part = OUTPUT; part <= DOWN; part += DOWN - OUTPUT) {
            multiply(t, plain[i].weights[part], plain[i].biases[part],
                     part == OUTPUT ? heads * dim : inner, hidden, narrow, added, tokens);
            for (int64_t j = 0; j < tokens * hidden; j++)
                put(t, residual, j, get(t, residual, j) + get(t, added, j));
            if (part == DOWN) break;
            normalize(t, residual, layer->post_norm, hidden, normed, tokens);
            multiply(t, plain[i].weights[GATE_UP], plain[i].biases[GATE_UP], hidden, 2 * inner,
                     normed, wide, tokens);
            for (int64_t j = 0; j < tokens * inner; j++) {
                double gate = get(t, wide, j / inner * 2 * inner + j % inner);
                double up = get(t, wide, j / inner * 2 * inner + inner + j % inner);
                put(t, narrow, j, (layer->is_gelu ? gelu_tanh(gate) : silu(gate)) * up);
            }
        }
    }
    normalize(t, residual, model->norm, hidden, normed, tokens);
    memcpy(residual, normed, tokens * hidden * SIZES[t]);
}

typedef struct {
    linear router;
    const linear *gate_up, *down;
    int64_t top_k, of_all, activation;
    float alpha, limit;
} experts;

typedef int route_function(const experts *, const void *, int32_t *, float *, int64_t);
typedef int mix_function(const experts *, const int32_t *, const float *, const void *, void *,
                         int64_t);

static double clamped(double gate, double up, double alpha, double limit) {
    gate = fmin(gate, limit), up = fmax(fmin(up, limit), -limit);
    return gate / (1 + exp(-alpha * gate)) * (up + 1);
}

static void check_experts(type t) {
    route_function *route = function("route", t);
    mix_function *mix = function("mix", t);
    const int64_t *panel = function("panel", t);
    if (!route || !mix || !panel) return;
    enum { NUM = 5, HIDDEN = 80, INNER = 48, ROWS = 13 };
    for (int kind = 0; kind < 6; kind++) {
        const int64_t top_k = kind < 3 ? 2 : kind < 5 ? 1 : NUM, activation = kind % 3;
        const int of_all = kind > 2, has_bias = activation == 2;
        begin("experts_%s %d of 5, activation %d", SUFFIXES[t], (int)top_k, (int)activation);
        void *weights[NUM][2], *biases[NUM][2] = {{0}};
        linear gate_up[NUM], down[NUM];
        for (int e = 0; e < NUM; e++) {
            weights[e][0] = random_numbers(t, 2 * INNER * HIDDEN, 0.2);
            weights[e][1] = random_numbers(t, HIDDEN * INNER, 0.2);
            if (has_bias)
                biases[e][0] = random_numbers(t, 2 * INNER, 1),
                biases[e][1] = random_numbers(t, HIDDEN, 1);
            gate_up[e] = pack(panel, t, weights[e][0], biases[e][0], HIDDEN, 2 * INNER);
            down[e] = pack(panel, t, weights[e][1], biases[e][1], INNER, HIDDEN);
        }
        void *router = random_numbers(t, NUM * HIDDEN, 0.1), *bias = random_numbers(t, NUM, 0.1);
        const experts all = {pack(panel, t, router, bias, HIDDEN, NUM), gate_up, down, top_k, of_all,
                             activation, 1.7f, 2};
        void *x = random_numbers(t, ROWS * HIDDEN, 1), *logits = allocate(ROWS * NUM * SIZES[t]);
        int32_t *chosen = allocate(ROWS * NUM * sizeof *chosen);
        float *shares = allocate(ROWS * NUM * sizeof *shares);
        CHECK_SHORTAGES(route, route(&all, x, chosen, shares, ROWS))
        multiply(t, router, bias, HIDDEN, NUM, x, logits, ROWS);
        for (int64_t row = 0; row < ROWS; row++) {  // of near ties either is right
            const int32_t *own = chosen + row * top_k;
            int times[NUM] = {0};
            double lowest = INFINITY, whole = 0;
            for (int64_t k = 0; k < top_k; k++) {
                if (own[k] < 0 || own[k] >= NUM || times[own[k]]++) fail("no %d twice", own[k]);
                lowest = fmin(lowest, get(t, logits, row * NUM + own[k]));
            }
            for (int e = 0; e < NUM; e++) {
                double v = get(t, logits, row * NUM + e);
                if (!times[e] && v > lowest + 4 * ROUNDING[t] + SUMMING) fail("%d is larger", e);
                if (times[e] || of_all) whole += exp(v);
            }
            for (int64_t k = 0; k < top_k; k++) {
                double share = exp(get(t, logits, row * NUM + own[k])) / whole;
                if (!(fabs(shares[row * top_k + k] - share) <= 4 * ROUNDING[t] + SUMMING))
                    fail("share %g, not %g", shares[row * top_k + k], share);
            }
        }
        void *out = allocate(ROWS * HIDDEN * SIZES[t]), *wide = allocate(2 * INNER * SIZES[t]);
        void *narrow = allocate(INNER * SIZES[t]), *made = allocate(HIDDEN * SIZES[t]);
        CHECK_SHORTAGES(mix, mix(&all, chosen, shares, x, out, ROWS))
        double error = 0, size = 0;
        for (int64_t row = 0; row < ROWS; row++) {
            double sums[HIDDEN] = {0};
            for (int64_t k = 0; k < top_k; k++) {
                const int e = chosen[row * top_k + k];
                multiply(t, weights[e][0], biases[e][0], HIDDEN, 2 * INNER,
                         (const char *)x + row * HIDDEN * SIZES[t], wide, 1);
                for (int64_t j = 0; j < INNER; j++) {
                    double gate = get(t, wide, j), up = get(t, wide, INNER + j);
                    put(t, narrow, j,
                        activation == 2   ? clamped(gate, up, all.alpha, all.limit)
                        : activation == 1 ? gelu_tanh(gate) * up
                                          : silu(gate) * up);
                }
                multiply(t, weights[e][1], biases[e][1], INNER, HIDDEN, narrow, made, 1);
                for (int64_t j = 0; j < HIDDEN; j++)
                    sums[j] += shares[row * top_k + k] * get(t, made, j);
            }
            for (int64_t j = 0; j < HIDDEN; j++)
                error += square(get(t, out, row * HIDDEN + j) - sums[j]), size += square(sums[j]);
        }
        const double most[] = {1e-5, 0.01, 0.002};
        if (!(sqrt(error / size) <= most[t])) fail("results differ by %.3g", sqrt(error / size));
        end();
    }
}

static void check_decode(type t) {
    decode_function *decode = function("decode", t);
    const int64_t *panel = function("panel", t);
    if (!decode || !panel) return;
    enum { LAYERS = 2, HIDDEN = 80, HEADS = 4, KV_HEADS = 2, INNER = 112, VOCABULARY = 101 };
    // Of the norm of all logits; sums that differ in their last bits are rounded apart, and on.
    const double most[] = {2e-5, 0.03, 0.004};
    const int64_t rows[][2] = {{1, 9}, {5, 5}, {3, 21}, {1, 1}, {18, 40}}, block_size = 4;
    enum { ROWS = 5, TOKENS = 28, WIDTH = 10, POSITIONS = 64 };
    for (int kind = 0; kind < 4; kind++) {
        const int has_norms = kind & 1, is_gelu = kind & 1, has_bias = kind >> 1;
        const int64_t dim = kind ? 16 : 32, window = kind == 2 ? 6 : 0;
        const float softcap = kind == 3 ? 4 : 0;
        begin("decode_%s heads of %d%s%s%s%s", SUFFIXES[t], (int)dim, has_norms ? ", norms, gelu" : "",
              has_bias ? ", biases" : "", window ? ", window" : "", softcap > 0 ? ", soft cap" : "");
        const int64_t width = (HEADS + 2 * KV_HEADS) * dim;
        const int64_t sizes[][2] = {{HIDDEN, width}, {HEADS * dim, HIDDEN}, {HIDDEN, 2 * INNER},
                                    {INNER, HIDDEN}};
        const int64_t numbers = ROWS * WIDTH * KV_HEADS * block_size * dim;
        decoder_layer layers[LAYERS];
        plain_layer plain[LAYERS];
        void *keys[LAYERS], *values[LAYERS];
        float *cos_sin = allocate(POSITIONS * dim * sizeof *cos_sin);
        for (int64_t p = 0; p < POSITIONS; p++)
            for (int64_t d = 0; d < dim / 2; d++) {
                double angle = p * pow(100, -2. * d / dim);
                cos_sin[p * dim + d] = cos(angle), cos_sin[p * dim + dim / 2 + d] = sin(angle);
            }
        for (int i = 0; i < LAYERS; i++) {
            linear *parts[] = {&layers[i].qkv, &layers[i].output, &layers[i].gate_up, &layers[i].down};
            layers[i] = (decoder_layer){
                .input_norm = random_numbers(t, HIDDEN, 1),
                .post_norm = random_numbers(t, HIDDEN, 1),
                .q_norm = has_norms ? random_numbers(t, dim, 1) : 0,
                .k_norm = has_norms ? random_numbers(t, dim, 1) : 0,
                .cos_sin = cos_sin,
                .key_cache = random_numbers(t, numbers, 1),
                .value_cache = random_numbers(t, numbers, 1),
                .q_heads = HEADS, .kv_heads = KV_HEADS, .head_dim = dim, .block_size = block_size,
                .window = window, .in_windows = window && i, .is_gelu = is_gelu, .softcap = softcap, .scaling = 1 / sqrtf(dim),
                .input_eps = 1e-5f, .post_eps = 1e-5f, .head_eps = 1e-5f,
            };
            keys[i] = copy(layers[i].key_cache, numbers * SIZES[t]);
            values[i] = copy(layers[i].value_cache, numbers * SIZES[t]);
            for (int part = 0; part < 4; part++) {
                int64_t in = sizes[part][0], out = sizes[part][1];
                plain[i].weights[part] = random_numbers(t, in * out, 1 / sqrt(in));
                plain[i].biases[part] = has_bias ? random_numbers(t, out, 0.1) : 0;
                *parts[part] = pack(panel, t, plain[i].weights[part], plain[i].biases[part], in, out);
            }
        }
        void *head = random_numbers(t, VOCABULARY * HIDDEN, 0.2);
        decoder model = {
            .embedding = random_numbers(t, VOCABULARY * HIDDEN, 1), .layers = layers,
            .norm = random_numbers(t, HIDDEN, 1), .num_layers = LAYERS, .hidden = HIDDEN,
            .wide = width > 2 * INNER ? width : 2 * INNER, .eps = 1e-5f,
            .head = pack(panel, t, head, 0, HIDDEN, VOCABULARY),
        };
        int64_t ids[TOKENS], positions[TOKENS], slots[TOKENS], starts[ROWS + 1], lengths[ROWS];
        int64_t *order = shuffled(ROWS * WIDTH), tokens = 0, sampling[] = {0, 5, 8, 9, 26, 27};
        int64_t *others = shuffled(ROWS * WIDTH), window_slots[TOKENS];
        int32_t table[ROWS * WIDTH], window_table[ROWS * WIDTH];
        for (int b = 0; b < ROWS * WIDTH; b++) table[b] = order[b], window_table[b] = others[b];
        for (int r = 0; r < ROWS; r++) {
            starts[r] = tokens, lengths[r] = rows[r][1];
            for (int64_t p = rows[r][1] - rows[r][0]; p < rows[r][1]; p++, tokens++) {
                ids[tokens] = below(VOCABULARY), positions[tokens] = p;
                slots[tokens] = table[r * WIDTH + p / block_size] * block_size + p % block_size;
                window_slots[tokens] =
                    window_table[r * WIDTH + p / block_size] * block_size + p % block_size;
            }
            // What fell out of the window of a row's first token: whoever reads there is gone.
            for (int64_t b = 0; (b + 1) * block_size <= rows[r][1] - rows[r][0] - window + 1; b++)
                window_table[r * WIDTH + b] = 1 << 30;
        }
        starts[ROWS] = tokens;
        const int64_t first[] = {0};
        void *embedded = allocate(TOKENS * HIDDEN * SIZES[t]);
        void *tapped = allocate(TOKENS * HIDDEN * SIZES[t]);
        decoder_step step = {ids, positions, slots, starts, lengths, sampling, table,
                             window_slots, window_table, TOKENS, ROWS, WIDTH,
                             sizeof sampling / sizeof *sampling, 0, 0, 0, 0, first,
                             tapped, 1};
        void *residual = allocate(TOKENS * HIDDEN * SIZES[t]), *expected;
        for (int j = 0; j < TOKENS; j++)
            memcpy((char *)residual + j * HIDDEN * SIZES[t],
                   (const char *)model.embedding + ids[j] * HIDDEN * SIZES[t], HIDDEN * SIZES[t]);
        memcpy(embedded, residual, TOKENS * HIDDEN * SIZES[t]);
        pass(t, &model, plain, &step, residual, keys, values);
        expected = allocate(TOKENS * VOCABULARY * SIZES[t]);
        multiply(t, head, 0, HIDDEN, VOCABULARY, residual, expected, TOKENS);
        void *scratch = allocate(TOKENS * 2 * (HIDDEN + model.wide) * SIZES[t]);
        void *logits = allocate(TOKENS * VOCABULARY * SIZES[t]);
        decode(&model, &step, scratch, logits);
        if (memcmp(tapped, embedded, TOKENS * HIDDEN * SIZES[t])) fail("the tap differs");
        double error = 0, size = 0;
        for (int64_t j = 0; j < step.num_sampling * VOCABULARY; j++) {
            double right = get(t, expected, sampling[j / VOCABULARY] * VOCABULARY + j % VOCABULARY);
            error += square(get(t, logits, j) - right), size += square(right);
        }
        if (!(sqrt(error / size) <= most[t])) fail("logits differ by %.3g", sqrt(error / size));
        error = size = 0;
        for (int64_t j = 0; j < numbers; j++) {  // also what nobody may have touched
            error += square(get(t, layers[1].key_cache, j) - get(t, keys[1], j));
            size += square(get(t, keys[1], j));
        }
        if (!(sqrt(error / size) <= most[t])) fail("keys differ by %.3g", sqrt(error / size));
        step.num_sampling = 0;
        memset(logits, 0x5a, VOCABULARY * SIZES[t]);
        decode(&model, &step, scratch, logits);
        for (int64_t j = 0; j < VOCABULARY * SIZES[t]; j++)
            if (((char *)logits)[j] != 0x5a) fail("it wrote logits that nobody wants");
        step.num_sampling = sizeof sampling / sizeof *sampling;
        CHECK_SHORTAGES(decode, decode(&model, &step, scratch, logits))
        end();
    }
}

#include "check_states.h"
#include "check_tokens.h"

int main(int count, char **arguments) {
    list_values();
#ifdef __x86_64__
    syscall(158, 0x1023, 18);  // the registers of AMX have to be asked for; aioserve does so, too
#endif
    dlopen("libgomp.so.1", RTLD_NOW | RTLD_GLOBAL);  // the kernels bring no OpenMP of their own
    library = count > 1 ? dlopen(arguments[1], RTLD_NOW) : 0;
    if (!library) {
        fprintf(stderr, "usage: check_kernels LIBRARY: %s\n", count > 1 ? dlerror() : "none given");
        return 2;
    }
    for (type t = F32; t < TYPES; t++) {
        check_norms(t);
        check_gates(t);
        check_store(t);
        check_rope(t);
        check_attention(t, AS_THEY_ARE);
        check_attention(t, AS_CODES);
        check_attention(t, BY_BYTES);
        check_linear(t);
        check_low_rank(t);
        check_blocks(t, 0);
        check_blocks(t, 1);
        check_experts(t);
        check_decode(t);
        check_states(t);
    }
    if (count > 2) check_tokens(arguments[2]);
    printf("%d passed, %d failed\n", num_passed, num_failed);
    return num_failed > 0;
}
