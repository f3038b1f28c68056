// One token for each row of logits: the best, or a draw by noise that depends on seed, position and
// token alone, as ../../../runner/batch/sampling_columns.py defines it. Where rounding might choose
// another token than ../../../runner/cpu/sampler.py does, the row is left to that.
//
// A library of its own, built for three instruction sets (see setup.py), called through ctypes (see
// ../../tokens.py): it compiles in seconds. Knows no Python, no torch, and no OpenMP runtime.
#include <math.h>
#include "../vector.h"

#ifdef SOURCES_DIGEST
const char sources_digest[] = SOURCES_DIGEST;  // see ../../tokens.py
#endif

// Fewer numbers than this are looked at before the other threads have started.
#define PARALLEL_SAMPLING_FROM 65536
#define STRETCH 256      // logits that are passed over together where none of them can be chosen
#define MOST_TOP_K 256   // a larger top-k is left to the caller
#define MOST_NOISE 16.7f // of a token: -log(-log(1 - 2^-24)) is 16.64
#define NEAR_SCORE 1e-4f // scores that differ by less might be in another order elsewhere
#define NEAR_MASS 5e-6   // the same of sums of probabilities, of all that is there

// A row that is drawn from. Scaled logits are (logit - top) / temperature: 0 and less.
typedef struct {
    const float *logits, *tops;  // tops: of each stretch the largest
    int64_t size;
    float top, temperature;
    uint32_t keys[2];
} drawn_row;

typedef struct {
    int64_t token;  // -1: there is none
    float scaled, score, second;  // its scaled logit, its score, and that of the next best
} drawn;

// W hash words at a time, as `mix` has it there.
INLINE vu mix_words(vu x) {
    x ^= x >> 16;
    x *= 0x7feb352d;
    x ^= x >> 15;
    x *= 0x846ca68b;
    return x ^ (x >> 16);
}

INLINE uint32_t mix_word(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7feb352d;
    x ^= x >> 15;
    x *= 0x846ca68b;
    return x ^ (x >> 16);
}

// Natural logarithm to 2 units in the last place, of normal numbers above 0. Cephes' logf.
INLINE vf log_(vf x) {
    const vi shifted = (vi)x - 0x3f3504f3;  // the bits of sqrt(1/2): e is 0 around 1
    const vf e = to_floats(shifted >> 23), f = (vf)((shifted & 0x7fffff) + 0x3f3504f3) - 1.f;
    vf p = splat(7.0376836292e-2f);
    p = p * f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    const vf z = f * f;
    return e * 0.693359375f + (f + (p * f * z - e * 2.12194440e-4f - 0.5f * z));
}

// The top 23 bits of the hash words of W tokens from `first` on.
INLINE vi noise_bits(const uint32_t keys[2], int64_t first) {
    const vu words = mix_words((vu)INDEXES + ((uint32_t)first + keys[0]));
    return (vi)(mix_words(words ^ keys[1]) >> 9);
}

// -log(-log(u)), u in (0, 1) of such bits.
INLINE vf noise(vi bits) { return -log_(-log_((to_floats(bits) + 0.5f) * 0x1p-23f)); }

// Where a part of a row lies whole: there, or in `copy` with -inf behind its end.
INLINE const float *whole_part(const float *row, int64_t begin, int64_t size, float copy[STRETCH]) {
    if (begin + STRETCH <= size) return row + begin;
    for (int64_t i = 0; i < STRETCH; i++) copy[i] = begin + i < size ? row[begin + i] : -INFINITY;
    return copy;
}

// The largest of each stretch of a row, NaN where there is one; -inf behind the last.
static void find_tops(const float *row, int64_t size, int64_t count, float *tops) {
    float copy[STRETCH];
    for (int64_t i = 0; i < count; i++)
        tops[i] = i * STRETCH >= size
                      ? -INFINITY
                      : largest(whole_part(row, i * STRETCH, size, copy), STRETCH);
}

// The same of `lanes` rows beside each other, 1 or W, from `maxima`; NaN also where infinities meet.
INLINE void find_tops_together(int lanes, const float *maxima, int64_t size, int64_t width,
                               int64_t stride, int64_t count, float *tops) {
    for (int64_t i = 0; i < count; i++) {
        vf high = splat(-INFINITY), total = {0};
        for (int64_t at = i * STRETCH; at < (i + 1) * STRETCH && at < size; at += width) {
            vf own = {0};
            memcpy(&own, maxima, lanes * sizeof(float));
            high = maximum(own, high), total += own;
            maxima += stride;
        }
        high = pick(total == total, high, total);
        for (int r = 0; r < lanes; r++) tops[r * count + i] = high[r];
    }
}

// Where the first of `most` is, or of NaN; `count`: nowhere.
INLINE int64_t first_of(const float *p, int64_t count, float most) {
    int64_t place = 0;
    while (place < count && p[place] != most && p[place] == p[place]) place++;
    return place;
}

// Where the first of the largest of a row is, which becomes `best`; `size`: not where `tops` say.
static int64_t first_best(const float *row, int64_t size, const float *tops, int64_t count,
                          float *best) {
    *best = largest(tops, count);
    const int64_t begin = first_of(tops, count, *best) * STRETCH;
    const int64_t length = size - begin < STRETCH ? size - begin : STRETCH;
    const int64_t place = length > 0 ? first_of(row + begin, length, *best) : length;
    return place < length ? begin + place : size;
}

// The k-th largest of a row of more numbers than k: at the root of a heap of the k largest.
static float kth_largest(const drawn_row *row, int64_t k) {
    float heap[MOST_TOP_K], copy[STRETCH];
    for (int64_t i = 0; i < k; i++) heap[i] = -INFINITY;
    for (int64_t begin = 0; begin < row->size; begin += STRETCH) {
        if (row->tops[begin / STRETCH] <= heap[0]) continue;
        const float *part = whole_part(row->logits, begin, row->size, copy);
        for (int64_t i = 0; i < STRETCH; i++) {
            if (part[i] <= heap[0]) continue;
            int64_t at = 0;
            for (int64_t child; (child = 2 * at + 1) < k; at = child) {
                child += child + 1 < k && heap[child + 1] < heap[child];
                if (part[i] <= heap[child]) break;
                heap[at] = heap[child];
            }
            heap[at] = part[i];
        }
    }
    return heap[0];
}

INLINE float scaled(const drawn_row *row, float logit) {
    return (logit - row->top) / row->temperature;
}

// The best of tokens with scaled logits of at least `lowest` and above `above`. The part from
// `first` on, which holds the most likely token, comes before the others: few of those matter then.
static drawn draw_above(const drawn_row *row, int64_t first, float lowest, float above) {
    float copy[STRETCH], scores[STRETCH];
    vi bits[STRETCH / W];
    drawn found = {-1, 0, -INFINITY, -INFINITY};
    for (int64_t turn = -STRETCH; turn < row->size; turn += STRETCH) {
        const int64_t begin = turn < 0 ? first : turn;
        if (turn == first) continue;
        const float most = scaled(row, row->tops[begin / STRETCH]);
        if (!(most > above) || most < lowest || most + MOST_NOISE < found.second) continue;
        const float *part = whole_part(row->logits, begin, row->size, copy);
        vi most_bits = {0};
        for (int64_t i = 0; i < STRETCH / W; i++) {
            bits[i] = noise_bits(row->keys, begin + i * W);
            most_bits = (vi)pick(bits[i] > most_bits, (vf)bits[i], (vf)most_bits);
        }
        if (most + highest(noise(most_bits)) + NEAR_SCORE < found.second) continue;
        vf high = splat(-INFINITY);
        for (int64_t i = 0; i < STRETCH / W; i++) {
            const vf v = (load_f32(part + i * W) - row->top) / row->temperature;
            const vi is_kept = (v >= lowest) & (v > above);
            const vf score = pick(is_kept, v + noise(bits[i]), splat(-INFINITY));
            store_f32(scores + i * W, score);
            high = maximum(score, high);
        }
        if (highest(high) <= found.second) continue;
        for (int64_t i = 0; i < STRETCH; i++) {
            if (scores[i] <= found.second) continue;
            if (scores[i] <= found.score) {
                found.second = scores[i];
                continue;
            }
            found = (drawn){begin + i, scaled(row, part[i]), scores[i], found.score};
        }
    }
    return found;
}

// Of tokens with scaled logits of at least `lowest`: how many there are, the sum of e^scaled, and
// that of those above `above`.
typedef struct {
    int64_t count;
    double all, above;
} mass;

static mass mass_of(const drawn_row *row, float lowest, float above) {
    float copy[STRETCH];
    mass total = {0, 0, 0};
    for (int64_t begin = 0; begin < row->size; begin += STRETCH) {
        const float most = scaled(row, row->tops[begin / STRETCH]);
        if (most < lowest || most < -80) continue;  // fewer than 2^40 of e^-80 are nothing
        const float *part = whole_part(row->logits, begin, row->size, copy);
        vf all = {0}, higher = {0};
        vi count = {0};
        for (int64_t i = 0; i < STRETCH; i += W) {
            const vf v = (load_f32(part + i) - row->top) / row->temperature;
            const vf weight = (vf)((v >= lowest) & (vi)exp_(v));
            count -= v >= lowest;
            all += weight;
            higher += (vf)((v > above) & (vi)weight);
        }
        total.all += sum(all);
        total.above += sum(higher);
        for (int64_t i = 0; i < W; i++) total.count += count[i];
    }
    return total;
}

enum { DRAWN, LEFT_OPEN };

// A token by temperature, top-k, top-p and min-p, of which `least` is what min-p leaves.
static int draw(const drawn_row *row, int64_t best, int64_t top_k, float top_p, float least,
                int64_t *token) {
    if (top_k >= row->size) top_k = 0;
    if (top_k > MOST_TOP_K) return LEFT_OPEN;
    const int64_t first = best - best % STRETCH;
    const float lowest = top_k ? scaled(row, kth_largest(row, top_k)) : -INFINITY;
    const float bound = lowest > least ? lowest : least;
    // Top-p keeps a token if those above it have less than its share. If the one that was drawn
    // is not kept, none below it is: another one is drawn of those above.
    for (float above = -INFINITY;;) {
        const drawn found = draw_above(row, first, bound, above);
        if (found.token < 0 || found.score - found.second < NEAR_SCORE) return LEFT_OPEN;
        *token = found.token;
        if (top_p >= 1 || found.scaled >= 0) return DRAWN;  // the most likely ones are always kept
        const mass total = mass_of(row, lowest, found.scaled);
        // Equals of the last of the top-k: how many the sampler adds up depends on its batch.
        if (top_k && total.count > top_k + 1) return LEFT_OPEN;
        const double target = (double)top_p * total.all, near = NEAR_MASS * total.all;
        if (total.above < target - near) return DRAWN;
        if (total.above <= target + near) return LEFT_OPEN;
        above = found.scaled;
    }
}

enum { ALL_CHOSEN = 0, SOME_OPEN = 1, SOME_UNSOUND = 2 };

// Of `logits` [rows, size]: `token_ids`, and `best`, the largest logit of each. A row whose best is
// not finite has its place as its token. A row of `temperature` 0 has the first of its best, others
// are drawn: by `top_k` (0: all), `top_p`, `least` (what min-p leaves, as a bound on scaled logits),
// `seeds` [rows, 2] and `positions`, which are not read if no temperature is above 0. `is_open`: rows
// that are not drawn. `maxima` [size / width, rows]: the largest of each `width` logits of a row, which
// divide STRETCH; or null. Returns which kinds of rows there are.
int choose_tokens(const float *logits, int64_t rows, int64_t size, const float *maxima,
                  int64_t width, const float *temperature, const int64_t *top_k,
                  const float *top_p, const float *least, const uint32_t *seeds,
                  const int64_t *positions, int64_t *token_ids, float *best, uint8_t *is_open) {
    const int64_t count = ((size - 1) / STRETCH / (2 * W) + 1) * 2 * W;  // of stretches, and more
    const int64_t at_once = maxima && !seeds && rows >= W ? W : 1;  // no row takes long then
    int told = ALL_CHOSEN;
#pragma omp parallel for schedule(dynamic) reduction(| : told) \
    if (rows > at_once && rows * size >= PARALLEL_SAMPLING_FROM)
    for (int64_t first = 0; first < rows; first += at_once) {
        float tops[at_once * count];
        const int64_t begin = first + at_once > rows ? rows - at_once : first;
        if (at_once == W)
            find_tops_together(W, maxima + begin, size, width, rows, count, tops);
        else if (maxima)
            find_tops_together(1, maxima + begin, size, width, rows, count, tops);
        for (int64_t i = first; i < begin + at_once; i++) {
            const float *row = logits + i * size;
            float *const own_tops = tops + (i - begin) * count;
            token_ids[i] = maxima ? first_best(row, size, own_tops, count, best + i) : size;
            if (token_ids[i] == size) {  // also where what was noted is there no more
                find_tops(row, size, count, own_tops);
                token_ids[i] = first_best(row, size, own_tops, count, best + i);
            }
            is_open[i] = 0;
            if (best[i] - best[i] != 0) {
                told |= SOME_UNSOUND;
            } else if (temperature[i] > 0) {
                uint32_t key = mix_word(seeds[2 * i] + 0x9e3779b9);
                key = mix_word(mix_word(key ^ seeds[2 * i + 1]) + (uint32_t)positions[i]);
                const drawn_row own = {row, own_tops, size, best[i], temperature[i],
                                       {key, mix_word(key + 0x9e3779b9)}};
                is_open[i] = draw(&own, token_ids[i], top_k[i], top_p[i], least[i], token_ids + i);
                if (is_open[i]) told |= SOME_OPEN;
            }
        }
    }
    return told;
}
