// The gated delta rule over the tokens of some texts, each behind its state (Yang, Kautz and
// Hatamizadeh, "Gated Delta Networks", ICLR 2025): for a head with state S [key_dim, value_dim],
// S *= decay, S += k d' with d = beta (v - S' k), out = S' q.
//
// Four tokens at a time, as the chunks of that paper: S is read once for what the keys know and the
// queries ask, and once to change it; what the tokens do to each other is a triangular system of
// 4 x 4 numbers, solved by substitution. Sums are float32. A piece of the columns of S stays in the
// nearest cache for 32 tokens. With larger chunks the products are as many, so more would not pay.
#pragma once
#include "any_element.h"

#define DELTA_TOKENS 4
#define DELTA_PIECE 32  // tokens for which a part of S stays near
#define DELTA_KEYS 256  // most numbers of a key
#if W == 16 || defined(__aarch64__)
#define DELTA_WIDE 2  // vectors of columns: as many as there are registers for their sums
#else
#define DELTA_WIDE 1
#endif

// Queries and keys of a piece of one head, and what is the same for all columns of S.
typedef struct __attribute__((aligned(LINE))) {
    float q[DELTA_PIECE * DELTA_KEYS], k[DELTA_PIECE * DELTA_KEYS];
    float kept[DELTA_PIECE];   // of S before the token's block, after the token
    float added[DELTA_PIECE];  // of what the token adds, at the end of its block
    float beta[DELTA_PIECE];
    float known[DELTA_PIECE][DELTA_TOKENS], asked[DELTA_PIECE][DELTA_TOKENS];  // of an earlier one
} delta_piece;

// `num` tokens from `first` on, a block; keys have `wide` numbers, a multiple of W.
INLINE void relate_tokens(delta_piece *piece, const float *decay, int64_t stride, int first, int num,
                          int64_t wide) {
    float ratio[DELTA_TOKENS] = {0}, kept = 1;
    for (int t = 0; t < num; t++) {
        int now = first + t;
        const float *q = piece->q + now * DELTA_KEYS, *k = piece->k + now * DELTA_KEYS;
        float d = decay[now * stride];
        kept *= d;
        for (int s = 0; s < t; s++) ratio[s] *= d;
        ratio[t] = 1;
        piece->kept[now] = kept;
        for (int s = 0; s <= t; s++) {
            const float *other = piece->k + (first + s) * DELTA_KEYS;
            piece->asked[now][s] = ratio[s] * dot_product(q, other, wide);
            piece->known[now][s] = s < t ? ratio[s] * dot_product(k, other, wide) : 0;
        }
    }
    for (int s = 0; s < num; s++) piece->added[first + s] = ratio[s];
}

// `n` vectors of the columns of S, `num` tokens from `first` on; both numbers are constants. Values
// and outputs are those of the first token and column; of the next token `values` further.
INLINE void delta_columns(float *s, const delta_piece *piece, int first, const void *v, void *out,
                          int64_t v_token, int64_t out_token, int64_t type, int64_t size,
                          int64_t width, int num, int n) {
    const float *q = piece->q + first * DELTA_KEYS, *k = piece->k + first * DELTA_KEYS;
    vf known[DELTA_TOKENS][4], asked[DELTA_TOKENS][4];
    for (int t = 0; t < num; t++)
        for (int j = 0; j < n; j++) known[t][j] = asked[t][j] = splat(0);
    for (int64_t i = 0; i < size; i++) {
        vf row[4];
        for (int j = 0; j < n; j++) row[j] = load_f32(s + i * width + j * W);
        for (int t = 0; t < num; t++) {
            vf key = splat(k[t * DELTA_KEYS + i]), query = splat(q[t * DELTA_KEYS + i]);
            for (int j = 0; j < n; j++) {
                known[t][j] = multiply_add(row[j], key, known[t][j]);
                asked[t][j] = multiply_add(row[j], query, asked[t][j]);
            }
        }
    }
    for (int t = 0; t < num; t++) {
        int now = first + t;
        for (int j = 0; j < n; j++) {
            vf had = known[t][j] * splat(piece->kept[now]);
            vf result = asked[t][j] * splat(piece->kept[now]);
            for (int s = 0; s < t; s++) {  // known[s] is the change of token s by now
                had = multiply_add(known[s][j], splat(piece->known[now][s]), had);
                result = multiply_add(known[s][j], splat(piece->asked[now][s]), result);
            }
            vf change = (load_any(v, t * v_token + j * W, type) - had) * splat(piece->beta[now]);
            known[t][j] = change;
            result = multiply_add(change, splat(piece->asked[now][t]), result);
            store_any(out, t * out_token + j * W, type, result);
        }
    }
    for (int t = 0; t < num; t++)
        for (int j = 0; j < n; j++) known[t][j] *= splat(piece->added[first + t]);
    vf kept = splat(piece->kept[first + num - 1]);
    for (int64_t i = 0; i < size; i++)
        for (int j = 0; j < n; j++) {
            vf now = load_f32(s + i * width + j * W) * kept;
            for (int t = 0; t < num; t++)
                now = multiply_add(splat(k[t * DELTA_KEYS + i]), known[t][j], now);
            store_f32(s + i * width + j * W, now);
        }
}

INLINE void move_columns(float *to, int64_t to_width, const float *from, int64_t from_width,
                         int64_t size) {
    for (int64_t i = 0; i < size; i++)
        for (int j = 0; j < DELTA_WIDE; j++)
            store_f32(to + i * to_width + j * W, load_f32(from + i * from_width + j * W));
}

#define DELTA_COLUMNS(at, width, num, n)                                                            \
    delta_columns(at, &piece, t, any_at(v, t * v_token + c, type),                               \
                  (void *)any_at(out, t * out_token + c, type), v_token, out_token, type, key_dim,  \
                  width, num, n)

// All tokens of one head. `decay` and `beta` of the next token are `stride` further.
INLINE void delta_head(float *s, const void *q, int64_t q_token, const void *k, int64_t k_token,
                       const void *v, int64_t v_token, void *out, int64_t out_token, int64_t type,
                       const float *decay, const float *beta, int64_t stride, int64_t tokens,
                       int64_t key_dim, int64_t value_dim, int64_t is_normalized, float scale) {
    delta_piece piece;
    int64_t wide = (key_dim + W - 1) / W * W;
    for (int64_t start = 0; start < tokens; start += DELTA_PIECE) {
        int num = tokens - start < DELTA_PIECE ? tokens - start : DELTA_PIECE;
        int whole = num / DELTA_TOKENS * DELTA_TOKENS;
        for (int t = 0; t < num; t++) {
            float *query = piece.q + t * DELTA_KEYS, *key = piece.k + t * DELTA_KEYS;
            widen_any(q, t * q_token, type, query, key_dim);
            widen_any(k, t * k_token, type, key, key_dim);
            float by_query = scale, by_key = 1;
            if (is_normalized) {
                by_query /= __builtin_sqrtf(dot_product(query, query, wide) + 1e-6f);
                by_key /= __builtin_sqrtf(dot_product(key, key, wide) + 1e-6f);
            }
            for (int64_t i = 0; i < wide; i += W) {
                store_f32(query + i, load_f32(query + i) * splat(by_query));
                store_f32(key + i, load_f32(key + i) * splat(by_key));
            }
            piece.beta[t] = beta[t * stride];
        }
        for (int t = 0; t < whole; t += DELTA_TOKENS)
            relate_tokens(&piece, decay, stride, t, DELTA_TOKENS, wide);
        for (int t = whole; t < num; t++) relate_tokens(&piece, decay, stride, t, 1, wide);
        int64_t c = 0;
        for (; num == 1 && c + 4 * W <= value_dim; c += 4 * W) {
            int t = 0;
            DELTA_COLUMNS(s + c, value_dim, 1, 4);
        }
        for (; c + DELTA_WIDE * W <= value_dim; c += DELTA_WIDE * W) {
            // Rows of S are a power of two apart, so few lines of a column stay in a cache.
            float near[DELTA_KEYS * DELTA_WIDE * W] __attribute__((aligned(LINE)));
            move_columns(near, DELTA_WIDE * W, s + c, value_dim, key_dim);
            int t = 0;
            for (; t < whole; t += DELTA_TOKENS)
                DELTA_COLUMNS(near, DELTA_WIDE * W, DELTA_TOKENS, DELTA_WIDE);
            for (; t < num; t++) DELTA_COLUMNS(near, DELTA_WIDE * W, 1, DELTA_WIDE);
            move_columns(s + c, value_dim, near, DELTA_WIDE * W, key_dim);
        }
        for (; c < value_dim; c += W) {
            int t = 0;
            for (; t < whole; t += DELTA_TOKENS) DELTA_COLUMNS(s + c, value_dim, DELTA_TOKENS, 1);
            for (; t < num; t++) DELTA_COLUMNS(s + c, value_dim, 1, 1);
        }
        q = any_at(q, num * q_token, type), k = any_at(k, num * k_token, type);
        v = any_at(v, num * v_token, type), out = (void *)any_at(out, num * out_token, type);
        decay += num * stride, beta += num * stride;
    }
}

// The states of row r begin at states + r * stride: [value_heads, key_dim, value_dim]; value_dim is
// a multiple of 16, key_dim at most 256. q and k [rows, tokens, key_heads, key_dim] and v [rows,
// tokens, value_heads, value_dim], of one type, whose rows and tokens lie the given numbers apart;
// out as v, in one piece; decay and beta [rows, tokens, value_heads]. Neighbouring value heads have
// a key head in common. Queries are scaled; if `is_normalized` also divided by their lengths, as keys.
void gated_delta(float *states, int64_t stride, const void *q, int64_t q_row, int64_t q_token,
                 const void *k, int64_t k_row, int64_t k_token, const void *v, int64_t v_row,
                 int64_t v_token, int64_t type, const float *decay, const float *beta, void *out,
                 int64_t rows, int64_t tokens, int64_t key_heads, int64_t value_heads,
                 int64_t key_dim, int64_t value_dim, int64_t is_normalized, float scale) {
    int64_t per_head = key_dim * value_dim, each = value_heads / key_heads;
    int64_t out_token = value_heads * value_dim;
#pragma omp parallel for if (rows * tokens * value_heads * per_head >= STATES_PARALLEL_FROM)
    for (int64_t i = 0; i < rows * value_heads; i++) {
        int64_t row = i / value_heads, head = i % value_heads, first = row * tokens;
        int64_t key = head / each * key_dim, value = head * value_dim;
        delta_head(states + row * stride + head * per_head, any_at(q, row * q_row + key, type),
                   q_token, any_at(k, row * k_row + key, type), k_token,
                   any_at(v, row * v_row + value, type), v_token,
                   (void *)any_at(out, first * out_token + value, type), out_token, type,
                   decay + first * value_heads + head, beta + first * value_heads + head,
                   value_heads, tokens, key_dim, value_dim, is_normalized, scale);
    }
}
