// Tokens that are chosen from rows of logits, against a look at every token in double. Part of
// check_kernels.c, of which it uses the numbers and the judging.
#pragma once

typedef int choose_function(const float *, int64_t, int64_t, const float *, int64_t, const float *,
                            const int64_t *, const float *, const float *, const uint32_t *,
                            const int64_t *, int64_t *, float *, uint8_t *);

static uint32_t mixed(uint32_t x) {
    x = (x ^ x >> 16) * 0x7feb352d;
    x = (x ^ x >> 15) * 0x846ca68b;
    return x ^ x >> 16;
}

// What is added to the scaled logit of a token.
static double noise_of(const uint32_t *seeds, int64_t position, int64_t token) {
    uint32_t first = mixed(mixed(mixed(seeds[0] + 0x9e3779b9) ^ seeds[1]) + (uint32_t)position);
    uint32_t word = mixed(mixed((uint32_t)token + first) ^ mixed(first + 0x9e3779b9));
    return -log(-log(((word >> 9) + 0.5) / 8388608));
}

// Whether top-k and top-p keep a token, from those that are more likely.
static int is_kept_token(const float *row, int64_t size, int64_t token, double temperature,
                         int64_t top_k, double top_p) {
    double all = 0, above = 0, top = -INFINITY;
    int64_t num_above = 0;
    for (int64_t i = 0; i < size; i++) top = fmax(top, row[i]);
    for (int64_t i = 0; i < size; i++) {
        int64_t larger = 0;
        for (int64_t j = 0; top_k && j < size; j++) larger += row[j] > row[i];
        if (top_k && larger >= top_k) continue;
        double weight = exp((row[i] - top) / temperature);
        all += weight;
        if (row[i] > row[token]) above += weight;
    }
    for (int64_t j = 0; j < size; j++) num_above += row[j] > row[token];
    return !num_above || ((!top_k || num_above < top_k) && (top_p >= 1 || above < top_p * all));
}

static void check_tokens(const char *path) {
    if (!(library = dlopen(path, RTLD_NOW))) fail("%s", dlerror()), num_failed++;
    choose_function *choose = library ? plain_function("choose_tokens") : 0;
    if (!choose) return;
    enum { ROWS = 20 };
    const int64_t sizes[] = {1, 40, 300, 517};
    const struct {
        float temperature, top_p, least;
        int64_t top_k;
    } ways[] = {{0, 1, -INFINITY, 0},       {1, 1, -INFINITY, 0},     {0.2f, 1, -INFINITY, 0},
                {1, 1, -INFINITY, 1},       {1.5f, 1, -INFINITY, 20}, {1, 0.9f, -INFINITY, 0},
                {2, 0.3f, -INFINITY, 0},    {1, 0.8f, -INFINITY, 30}, {1, 1, -1.5f, 0},
                {1.2f, 0.95f, -1.0f, 100}, {1, 1, -INFINITY, 300}};
    for (int s = 0; s < 4; s++)
        for (uint64_t way = 0; way < sizeof ways / sizeof *ways; way++) {
            const int64_t size = sizes[s], top_k = ways[way].top_k;
            begin("choose_tokens of %d, way %d", (int)size, (int)way);
            float *logits = random_numbers(F32, ROWS * size, 3), best[ROWS], temperature[ROWS];
            float top_p[ROWS], least[ROWS];
            int64_t top_ks[ROWS], positions[ROWS], tokens[ROWS], num_open = 0;
            uint32_t seeds[ROWS][2];
            uint8_t is_open[ROWS];
            for (int64_t i = 0; i < ROWS; i++) {
                temperature[i] = ways[way].temperature, top_p[i] = ways[way].top_p;
                least[i] = ways[way].least, top_ks[i] = top_k, positions[i] = below(5000);
                seeds[i][0] = below(1LL << 32), seeds[i][1] = below(1LL << 32);
            }
            if (size > 1) logits[ROWS * size - 2] = way % 3 ? NAN : INFINITY;
            const int64_t width = 8 << way % 3;
            float *maxima = allocate((size + width - 1) / width * ROWS * sizeof *maxima);
            for (int64_t i = 0; i < (size + width - 1) / width * ROWS; i++) {
                maxima[i] = -INFINITY;
                for (int64_t k = i / ROWS * width; k < size && k < (i / ROWS + 1) * width; k++) {
                    const float own = logits[i % ROWS * size + k];
                    if (!(own <= maxima[i]) && !isnan(maxima[i])) maxima[i] = own;
                }
            }
            const int told = choose(logits, ROWS, size, way % 4 < 2 ? maxima : 0, width, temperature,
                                    top_ks, top_p, least, way ? *seeds : 0, positions, tokens, best,
                                    is_open);
            for (int64_t row = 0; row < ROWS; row++) {
                const float *own = logits + row * size;
                const double t = temperature[row];
                if (size > 1 && row == ROWS - 1) {
                    if (isfinite(best[row]) || tokens[row] != size - 2 || is_open[row])
                        fail("of a row that is not sound: %d, %g", (int)tokens[row], best[row]);
                    continue;
                }
                int64_t chosen = 0;
                for (int64_t i = 0; i < size; i++) chosen = own[i] > own[chosen] ? i : chosen;
                if (best[row] != own[chosen]) fail("the best of row %d is %g", (int)row, best[row]);
                num_open += is_open[row];
                if (is_open[row]) continue;
                double score = -INFINITY, top = own[chosen];
                for (int64_t i = 0; i < size && t > 0; i++) {
                    const double scaled = (own[i] - top) / t;
                    const double own_score = scaled + noise_of(seeds[row], positions[row], i);
                    if (own_score <= score || (scaled < least[row] && own[i] < top)) continue;
                    if (!is_kept_token(own, size, i, t, top_k < size ? top_k : 0, top_p[row]))
                        continue;
                    score = own_score, chosen = i;
                }
                if (tokens[row] != chosen)
                    fail("row %d has %d, not %d", (int)row, (int)tokens[row], (int)chosen);
            }
            const int is_large = top_k > 256 && top_k < size;  // which is left to the caller
            if (is_large ? num_open < ROWS - 1 : num_open > 1) fail("%d are open", (int)num_open);
            if (told != (num_open > 0) + 2 * (size > 1)) fail("it says %d", told);
            end();
        }
}
