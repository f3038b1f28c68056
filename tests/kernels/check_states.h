// Checks the kernels of layers with states: part of check_kernels.c, of which it uses the numbers and
// the judging. Tokens are gone through one by one, in double.
#pragma once

static void *plain_function(const char *symbol) {
    void *found = dlsym(library, symbol);
    if (!found) {
        printf("FAILED %s: the library has no such function\n", symbol);
        num_failed++;
    }
    return found;
}

static float *random_floats(int64_t n, double low, double high) {
    float *p = allocate(n * sizeof *p);
    for (int64_t i = 0; i < n; i++) p[i] = low + (high - low) * uniform();
    return p;
}

enum { ROWS_OF_STATES = 3, GAP = 5 };  // numbers that lie between states, and between tokens

typedef void delta_function(float *, int64_t, const void *, int64_t, int64_t, const void *, int64_t,
                            int64_t, const void *, int64_t, int64_t, int64_t, const float *,
                            const float *, void *, int64_t, int64_t, int64_t, int64_t, int64_t,
                            int64_t, int64_t, float);

static void check_gated_delta(type t) {
    delta_function *gated_delta = plain_function("gated_delta");
    if (!gated_delta) return;
    const int64_t sizes[][5] = {  // tokens, key heads, value heads, numbers of a key, of a value
        {1, 1, 1, 16, 16}, {1, 2, 4, 24, 80}, {7, 2, 6, 24, 80}, {35, 1, 2, 64, 64}, {70, 1, 1, 128, 16}};
    for (int i = 0; i < 10; i++) {
        const int64_t *n = sizes[i / 2], rows = ROWS_OF_STATES, is_normalized = i % 2;
        int64_t tokens = n[0], keys = n[1] * n[3], values = n[2] * n[4], size = values * n[3];
        begin("gated_delta %s [%d, %d, %d, %d, %d]%s", SUFFIXES[t], (int)n[0], (int)n[1], (int)n[2],
              (int)n[3], (int)n[4], is_normalized ? " normalized" : "");
        float *states = random_numbers(F32, rows * (size + GAP), 1), scale = 0.7f;
        float *before = copy(states, rows * (size + GAP) * sizeof *states);
        double size_of_key = is_normalized ? 1 : 1 / sqrt(n[3]);  // longer ones would make S grow
        void *q = random_numbers(t, rows * tokens * (keys + GAP), size_of_key);
        void *k = random_numbers(t, rows * tokens * (keys + GAP), size_of_key / 2);
        void *v = random_numbers(t, rows * tokens * (values + GAP), 1);
        float *decay = random_floats(rows * tokens * n[2], 0.5, 1);
        float *beta = random_floats(rows * tokens * n[2], 0, 1);
        void *out = allocate(rows * tokens * values * SIZES[t]);
        int64_t key = keys + GAP, value = values + GAP;
        gated_delta(states, size + GAP, q, tokens * key, key, k, tokens * key, key, v,
                    tokens * value, value, t, decay, beta, out, rows, tokens, n[1], n[2], n[3],
                    n[4], is_normalized, scale);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t h = 0; h < n[2]; h++)
                for (int64_t d = 0; d < n[4]; d++) {  // a column of S
                    double column[128];
                    float *at = before + r * (size + GAP) + h * n[3] * n[4] + d;
                    for (int64_t e = 0; e < n[3]; e++) column[e] = at[e * n[4]];
                    for (int64_t j = r * tokens; j < (r + 1) * tokens; j++) {
                        int64_t own = j * key + h / (n[2] / n[1]) * n[3];
                        double of_key = 0, of_query = 0, known = 0, result = 0;
                        for (int64_t e = 0; e < n[3]; e++) {
                            of_key += square(get(t, k, own + e));
                            of_query += square(get(t, q, own + e));
                        }
                        of_key = is_normalized ? 1 / sqrt(of_key + 1e-6) : 1;
                        of_query = scale * (is_normalized ? 1 / sqrt(of_query + 1e-6) : 1);
                        for (int64_t e = 0; e < n[3]; e++) {
                            column[e] *= decay[j * n[2] + h];
                            known += column[e] * get(t, k, own + e) * of_key;
                        }
                        double change = get(t, v, j * value + h * n[4] + d) - known;
                        change *= beta[j * n[2] + h];
                        for (int64_t e = 0; e < n[3]; e++) {
                            column[e] += get(t, k, own + e) * of_key * change;
                            result += column[e] * get(t, q, own + e) * of_query;
                        }
                        int64_t place = j * values + h * n[4] + d;
                        compare(t, "out", place, get(t, out, place), result, 8, 1);
                    }
                    float *after = states + (at - before);
                    for (int64_t e = 0; e < n[3]; e++)
                        compare(F32, "state", e, after[e * n[4]], column[e], 4, 1);
                }
        for (int64_t r = 0; r < rows; r++)
            if (memcmp(states + r * (size + GAP) + size, before + r * (size + GAP) + size, 4 * GAP))
                fail("it wrote behind a state");
        end();
    }
}

typedef void space_function(float *, int64_t, const void *, int64_t, int64_t, const void *, int64_t,
                            int64_t, const void *, int64_t, int64_t, int64_t, const float *,
                            const float *, const float *, void *, int64_t, int64_t, int64_t,
                            int64_t, int64_t, int64_t);

static void check_state_space(type t) {
    space_function *state_space = plain_function("state_space");
    if (!state_space) return;
    const int64_t sizes[][5] = {  // tokens, heads, numbers of a head, groups, numbers of a state
        {1, 1, 1, 1, 16}, {1, 4, 23, 2, 48}, {7, 4, 23, 2, 48}, {34, 2, 64, 1, 128}};
    for (int i = 0; i < 4; i++) {
        const int64_t *n = sizes[i], rows = ROWS_OF_STATES;
        int64_t tokens = n[0], wide = n[1] * n[2], size = wide * n[4], group = n[3] * n[4];
        begin("state_space %s [%d, %d, %d, %d, %d]", SUFFIXES[t], (int)n[0], (int)n[1], (int)n[2],
              (int)n[3], (int)n[4]);
        float *states = random_numbers(F32, rows * (size + GAP), 1);
        float *before = copy(states, rows * (size + GAP) * sizeof *states);
        void *x = random_numbers(t, rows * tokens * (wide + GAP), 1);
        void *b = random_numbers(t, rows * tokens * (group + GAP), 1);
        void *c = random_numbers(t, rows * tokens * (group + GAP), 1);
        float *decay = random_floats(rows * tokens * n[1], 0.3, 0.9);
        float *dt = random_floats(rows * tokens * n[1], 0, 1), *d = random_floats(n[1], -1, 1);
        void *out = allocate(rows * tokens * wide * SIZES[t]);
        int64_t input = wide + GAP, part = group + GAP;
        state_space(states, size + GAP, x, tokens * input, input, b, tokens * part, part, c,
                    tokens * part, part, t, decay, dt, d, out, rows, tokens, n[1], n[2], n[3],
                    n[4]);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t h = 0; h < n[1]; h++)
                for (int64_t p = 0; p < n[2]; p++) {  // a row of S
                    double row[128];
                    float *at = before + r * (size + GAP) + (h * n[2] + p) * n[4];
                    for (int64_t e = 0; e < n[4]; e++) row[e] = at[e];
                    for (int64_t j = r * tokens; j < (r + 1) * tokens; j++) {
                        int64_t own = j * part + h / (n[1] / n[3]) * n[4];
                        double in = get(t, x, j * input + h * n[2] + p), result = d[h] * in;
                        double summed = fabs(result);
                        for (int64_t e = 0; e < n[4]; e++) {
                            row[e] = row[e] * decay[j * n[1] + h] +
                                     in * dt[j * n[1] + h] * get(t, b, own + e);
                            result += row[e] * get(t, c, own + e);
                            summed += fabs(row[e] * get(t, c, own + e));
                        }
                        int64_t place = j * wide + h * n[2] + p;
                        compare(t, "out", place, get(t, out, place), result, summed, 1);
                    }
                    float *after = states + (at - before);
                    for (int64_t e = 0; e < n[4]; e++)
                        compare(F32, "state", e, after[e], row[e], 4, 1);
                }
        for (int64_t r = 0; r < rows; r++)
            if (memcmp(states + r * (size + GAP) + size, before + r * (size + GAP) + size, 4 * GAP))
                fail("it wrote behind a state");
        end();
    }
}

typedef void scan_function(float *, int64_t, const float *, const float *, const float *,
                           const float *, const float *, const float *, float *, int64_t, int64_t,
                           int64_t, int64_t);

static void check_selective_scan(void) {
    scan_function *selective_scan = plain_function("selective_scan");
    if (!selective_scan) return;
    const int64_t sizes[][3] = {{1, 1, 16}, {5, 70, 16}, {33, 20, 32}};
    for (int i = 0; i < 3; i++) {
        const int64_t rows = ROWS_OF_STATES, tokens = sizes[i][0], n = sizes[i][1];
        int64_t size = sizes[i][2], of_row = n * size;
        begin("selective_scan [%d, %d, %d]", (int)tokens, (int)n, (int)size);
        float *states = random_numbers(F32, rows * (of_row + GAP), 1);
        float *before = copy(states, rows * (of_row + GAP) * sizeof *states);
        float *x = random_numbers(F32, rows * tokens * n, 1);
        float *dt = random_floats(rows * tokens * n, 0, 1), *a = random_floats(of_row, -2, 0);
        float *b = random_numbers(F32, rows * tokens * size, 1), *d = random_floats(n, -1, 1);
        float *c = random_numbers(F32, rows * tokens * size, 1);
        float *out = allocate(rows * tokens * n * sizeof *out);
        selective_scan(states, of_row + GAP, x, dt, a, b, c, d, out, rows, tokens, n, size);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t p = 0; p < n; p++) {
                double row[32];
                float *at = before + r * (of_row + GAP) + p * size;
                for (int64_t e = 0; e < size; e++) row[e] = at[e];
                for (int64_t j = r * tokens; j < (r + 1) * tokens; j++) {
                    double in = x[j * n + p], step = dt[j * n + p], result = d[p] * in, summed = 1;
                    for (int64_t e = 0; e < size; e++) {
                        row[e] = row[e] * exp(step * a[p * size + e]) + step * in * b[j * size + e];
                        result += row[e] * c[j * size + e];
                        summed += fabs(row[e] * c[j * size + e]);
                    }
                    compare(F32, "out", j * n + p, out[j * n + p], result, summed, 1);
                }
                float *after = states + (at - before);
                for (int64_t e = 0; e < size; e++)
                    compare(F32, "state", e, after[e], row[e], 4, 1);
            }
        end();
    }
}

typedef void conv_function(const void *, int64_t, int64_t, int64_t, const float *, const float *,
                           int64_t, void *, int64_t, int64_t, int64_t, int64_t);
typedef void conv_step_function(void *, int64_t, const void *, int64_t, int64_t, const void *,
                                const void *, int64_t, void *, int64_t, int64_t, int64_t, int64_t);

static void check_convolutions(type t) {
    conv_function *causal_conv = plain_function("causal_conv");
    conv_step_function *causal_conv_step = plain_function("causal_conv_step");
    if (!causal_conv || !causal_conv_step) return;
    const int64_t sizes[][4] = {  // tokens, channels, taps, inputs that are kept
        {1, 16, 4, 4}, {2, 80, 4, 3}, {9, 48, 3, 5}, {17, 16, 1, 1}};
    for (int i = 0; i < 16; i++) {
        const int64_t rows = ROWS_OF_STATES, *n = sizes[i / 4], taps = n[2], width = n[3];
        int has_bias = i % 2, is_silu = i / 2 % 2, is_whole = 0;
        int64_t tokens = n[0], channels = n[1], apart = channels + GAP;
        void *weight, *bias, *x, *out;
        float *numbers;
        for (; is_whole < 2; is_whole++) {
            begin("causal_conv%s %s [%d, %d, %d, %d]%s%s", is_whole ? "" : "_step", SUFFIXES[t],
                  (int)tokens, (int)channels, (int)taps, (int)width, has_bias ? " bias" : "",
                  is_silu ? " silu" : "");
            int64_t num = is_whole ? tokens : 1;
            x = random_numbers(t, rows * num * apart, 1);
            weight = random_numbers(t, channels * taps, 1), bias = random_numbers(t, channels, 1);
            out = allocate(rows * num * channels * SIZES[t]);
            int64_t of_row = channels * width + GAP;
            void *states = random_numbers(t, rows * of_row, 1);
            void *before = copy(states, rows * of_row * SIZES[t]);
            numbers = allocate((taps + 1) * channels * sizeof *numbers);  // taps, and biases
            for (int64_t c = 0; c < channels; c++) {
                for (int64_t j = 0; j < taps; j++)
                    numbers[j * channels + c] = get(t, weight, c * taps + j);
                numbers[taps * channels + c] = get(t, bias, c);
            }
            if (is_whole)
                causal_conv(x, num * apart, apart, t, numbers,
                            has_bias ? numbers + taps * channels : 0, is_silu, out, rows, num,
                            channels, taps);
            else
                causal_conv_step(states, of_row, x, apart, t, weight, has_bias ? bias : 0, is_silu,
                                 out, rows, channels, taps, width);
            for (int64_t j = 0; j < rows * num; j++)
                for (int64_t c = 0; c < channels; c++) {
                    double total = has_bias ? get(t, bias, c) : 0, summed = 1;
                    for (int64_t tap = 0; tap < taps; tap++) {
                        int64_t back = taps - 1 - tap;
                        double in = back <= j % num ? get(t, x, (j - back) * apart + c)
                                    : is_whole      ? 0
                                                    : get(t, before,
                                                          j * of_row + (c + 1) * width - back);
                        total += in * get(t, weight, c * taps + tap);
                        summed += fabs(in * get(t, weight, c * taps + tap));
                    }
                    double v = is_silu ? silu(total) : total;
                    compare(t, "out", j * channels + c, get(t, out, j * channels + c), v, summed, 1);
                }
            for (int64_t r = 0; r < rows && !is_whole; r++)
                for (int64_t e = 0; e < of_row; e++) {
                    int64_t c = e / width, j = e % width;
                    double expected = c >= channels   ? get(t, before, r * of_row + e)
                                      : j < width - 1 ? get(t, before, r * of_row + e + 1)
                                                      : get(t, x, r * apart + c);
                    if (get(t, states, r * of_row + e) != expected) fail("state %d", (int)e);
                }
            end();
        }
    }
}

typedef void gated_norm_function(const void *, const void *, int64_t, int64_t, const void *,
                                 int64_t, int64_t, float, int64_t, void *, int64_t, int64_t,
                                 int64_t);

static void check_gated_norms(type t) {
    gated_norm_function *gated_norm = plain_function("gated_norm");
    if (!gated_norm) return;
    const int64_t sizes[][4] = {{1, 1, 16, 1}, {5, 3, 80, 3}, {40, 8, 128, 1}};  // rows, groups, size
    for (int i = 0; i < 6; i++) {
        const int64_t *n = sizes[i / 2], wide = n[1] * n[2];
        int is_first = i % 2;
        begin("gated_norm %s [%d, %d, %d]%s", SUFFIXES[t], (int)n[0], (int)n[1], (int)n[2],
              is_first ? " gated first" : "");
        void *x = random_numbers(t, n[0] * wide, 1), *out = allocate(n[0] * wide * SIZES[t]);
        void *gate = random_numbers(t, n[0] * (wide + GAP), 2);
        void *weight = random_numbers(t, n[3] * n[2], 1);
        gated_norm(x, gate, wide + GAP, t, weight, t, n[3], 1e-5f, is_first, out, n[0], n[1], n[2]);
        for (int64_t g = 0; g < n[0] * n[1]; g++) {
            int64_t own = g / n[1] * (wide + GAP) + g % n[1] * n[2];
            double squares = 0;
            for (int64_t j = 0; j < n[2]; j++)
                squares += square(get(t, x, g * n[2] + j) *
                                  (is_first ? silu(get(t, gate, own + j)) : 1));
            for (int64_t j = 0; j < n[2]; j++) {
                double v = get(t, x, g * n[2] + j) * silu(get(t, gate, own + j));
                v *= get(t, weight, g % n[1] % n[3] * n[2] + j);
                v /= sqrt(squares / n[2] + 1e-5);
                compare(t, "out", g * n[2] + j, get(t, out, g * n[2] + j), v, fabs(v), 1);
            }
        }
        end();
    }
}

static void check_states(type t) {
    check_gated_delta(t);
    check_state_space(t);
    if (t == F32) check_selective_scan();
    check_convolutions(t);
    check_gated_norms(t);
}
