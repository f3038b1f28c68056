// Mamba 2 over the tokens of some texts, each behind its state (Dao and Gu, "Transformers are SSMs",
// ICML 2024): for a head with state S [head_dim, size], S = decay S + x (dt b)', out = S c + d x.
//
// Four tokens at a time, as the chunks of that paper: S is read and written once for them, and what
// they do to each other is a triangle of 4 x 4 numbers. Sums are float32; a head's state stays in the
// nearest cache for all tokens. With larger chunks the products are as many, so more would not pay.
#pragma once
#include "any_element.h"

#define SPACE_TOKENS 4
#define SPACE_ROWS 4    // of S, which read b and c once
#define SPACE_MOST 272  // numbers of b and c, and of x, which are 256 at most: no power of two

typedef struct __attribute__((aligned(LINE))) {
    float b[SPACE_TOKENS][SPACE_MOST], c[SPACE_TOKENS][SPACE_MOST], x[SPACE_TOKENS][SPACE_MOST];
    float in[SPACE_TOKENS][SPACE_MOST], out[SPACE_TOKENS][SPACE_MOST];
    float kept[SPACE_TOKENS], seen[SPACE_TOKENS][SPACE_TOKENS];
} space_block;

// Lane i is the sum of v[i], which are W vectors; v is used up.
INLINE vf sum_each(vf *v) {
#pragma GCC unroll 4
    for (int step = 1; step < W; step *= 2) {
        vi is_high = (INDEXES & step) != 0;
        vi low = (is_high & (INDEXES + (W - step))) | (~is_high & INDEXES);
        vi high = (is_high & (INDEXES + W)) | (~is_high & (INDEXES + step));
#pragma GCC unroll 16
        for (int i = 0; i < W; i += 2 * step)
            v[i] = __builtin_shuffle(v[i], v[i + step], low) +
                   __builtin_shuffle(v[i], v[i + step], high);
    }
    return v[0];
}

// Rows p .. p + n of S, `num` tokens: what the tokens find in S goes to `out`, and S becomes that
// behind them. Both numbers are constants.
INLINE void space_rows(float *s, space_block *block, int64_t p, int64_t size, int num, int n) {
    vf found[SPACE_ROWS * SPACE_TOKENS], kept = splat(block->kept[num - 1]);
    for (int i = 0; i < n * num; i++) found[i] = splat(0);
    float in[SPACE_ROWS][SPACE_TOKENS];
    for (int r = 0; r < n; r++)
        for (int t = 0; t < num; t++) in[r][t] = block->in[t][p + r];
    for (int64_t i = 0; i < size; i += W) {
        vf row[SPACE_ROWS];
        for (int r = 0; r < n; r++) row[r] = load_f32(s + r * size + i);
        for (int t = 0; t < num; t++) {
            vf c = load_f32(block->c[t] + i);
            for (int r = 0; r < n; r++)
                found[t * n + r] = multiply_add(row[r], c, found[t * n + r]);
        }
        for (int r = 0; r < n; r++) row[r] *= kept;
        for (int t = 0; t < num; t++) {
            vf b = load_f32(block->b[t] + i);
            for (int r = 0; r < n; r++)
                row[r] = multiply_add(splat(in[r][t]), b, row[r]);
        }
        for (int r = 0; r < n; r++) store_f32(s + r * size + i, row[r]);
    }
    float sums[SPACE_ROWS * SPACE_TOKENS];
    int done = 0;
    for (; done + W <= n * num; done += W) store_f32(sums + done, sum_each(found + done));
    for (; done < n * num; done++) sums[done] = sum(found[done]);
    for (int t = 0; t < num; t++)
        for (int r = 0; r < n; r++) block->out[t][p + r] = sums[t * n + r];
}

// Decays, what the tokens of the block put into S, and what earlier ones give to later ones; decay
// and dt of the next token are `stride` further.
INLINE void relate_inputs(space_block *block, const float *decay, const float *dt, int64_t stride,
                          float d, int64_t head_dim, int64_t size, int num) {
    float ratio[SPACE_TOKENS], kept = 1;
    for (int t = 0; t < num; t++) {
        kept *= decay[t * stride];
        for (int e = 0; e < t; e++) ratio[e] *= decay[t * stride];
        ratio[t] = dt[t * stride];
        block->kept[t] = kept;
        for (int e = 0; e <= t; e++)
            block->seen[t][e] = ratio[e] * dot_product(block->c[t], block->b[e], size);
        block->seen[t][t] += d;
    }
    for (int t = 0; t < num; t++)
        for (int64_t p = 0; p < head_dim; p += W)
            store_f32(block->in[t] + p, load_f32(block->x[t] + p) * splat(ratio[t]));
}

// What tokens have found in S becomes what they give: of S what was left of it, and of each other.
INLINE void add_inputs(space_block *block, int64_t head_dim, int num) {
    for (int t = 0; t < num; t++)
        for (int64_t p = 0; p < head_dim; p += W) {
            vf out = load_f32(block->out[t] + p) * splat(block->kept[t]);
            for (int e = 0; e <= t; e++)
                out = multiply_add(splat(block->seen[t][e]), load_f32(block->x[e] + p), out);
            store_f32(block->out[t] + p, out);
        }
}

// The states of row r begin at states + r * stride: [heads, head_dim, size]; size is a multiple of
// 16, and neither is above 256. x [rows, tokens, heads, head_dim], b and c [rows, tokens, groups,
// size], of one type, whose rows and tokens lie the given numbers apart; out as x, in one piece;
// decay and dt [rows, tokens, heads], d [heads]. Neighbouring heads have a group in common.
void state_space(float *states, int64_t stride, const void *x, int64_t x_row, int64_t x_token,
                 const void *b, int64_t b_row, int64_t b_token, const void *c, int64_t c_row,
                 int64_t c_token, int64_t type, const float *decay, const float *dt, const float *d,
                 void *out, int64_t rows, int64_t tokens, int64_t heads, int64_t head_dim,
                 int64_t groups, int64_t size) {
#pragma omp parallel for if (rows * tokens * heads * head_dim * size >= STATES_PARALLEL_FROM)
    for (int64_t i = 0; i < rows * heads; i++) {
        int64_t row = i / heads, head = i % heads, group = head / (heads / groups) * size;
        space_block block;
        float *s = states + row * stride + head * head_dim * size;
        for (int64_t t = 0; t < tokens;) {
            int num = t + SPACE_TOKENS <= tokens ? SPACE_TOKENS : 1;
            int64_t of_head = (row * tokens + t) * heads + head, p = 0;
            for (int e = 0; e < num; e++) {
                widen_any(b, row * b_row + (t + e) * b_token + group, type, block.b[e], size);
                widen_any(c, row * c_row + (t + e) * c_token + group, type, block.c[e], size);
                widen_any(x, row * x_row + (t + e) * x_token + head * head_dim, type, block.x[e],
                          head_dim);
            }
            relate_inputs(&block, decay + of_head, dt + of_head, heads, d[head], head_dim, size,
                          num);
            for (; num == SPACE_TOKENS && p + SPACE_ROWS <= head_dim; p += SPACE_ROWS)
                space_rows(s + p * size, &block, p, size, SPACE_TOKENS, SPACE_ROWS);
            for (; p < head_dim; p++)
                if (num == 1) space_rows(s + p * size, &block, p, size, 1, 1);
                else space_rows(s + p * size, &block, p, size, SPACE_TOKENS, 1);
            add_inputs(&block, head_dim, num);
            for (int e = 0; e < num; e++)
                narrow_any(block.out[e], out, (of_head + e * heads) * head_dim, type, head_dim);
            t += num;
        }
    }
}
