// The forward pass of a Llama-like decoder in one call: no Python between its operations, so an
// event loop in the same process runs on meanwhile. Included once, after the kernels for bfloat16.
#pragma once
#include "linear.h"

typedef struct {
    linear qkv, output, gate_up, down;
    const bf16 *input_norm, *post_norm;  // [hidden]
    const bf16 *q_norm, *k_norm;         // [head_dim], or null
    const float *cos_sin;
    bf16 *key_cache, *value_cache;
    int64_t q_heads, kv_heads, head_dim, block_size;
    int64_t window;  // 0: none
    int64_t is_gelu;
    float input_eps, post_eps, head_eps, scaling;
    float softcap;  // 0: none
} decoder_layer;

typedef struct {
    const bf16 *embedding;  // [vocabulary, hidden]
    const decoder_layer *layers;
    const bf16 *norm;
    linear head;
    int64_t num_layers, hidden, intermediate;
    int64_t wide;  // the most numbers that any operation makes of a token
    float eps;
} decoder;

typedef struct {
    const int64_t *input_ids, *positions, *slots;  // [tokens]
    const int64_t *query_start_loc, *seq_lens;     // [rows + 1], [rows]
    const int64_t *sampling;                       // [num_sampling], tokens whose logits are wanted
    const int32_t *block_table;                    // [rows, table_width]
    int64_t tokens, rows, table_width, num_sampling;
} decoder_step;

static void take_rows(bf16 *x, const int64_t *indices, int64_t count, int64_t n) {
    for (int64_t i = 0; i < count; i++)  // indices rise, so nothing is overwritten that is needed
        if (indices[i] != i) memcpy(x + i * n, x + indices[i] * n, n * sizeof(bf16));
}

// Logits [num_sampling, vocabulary]. `scratch`: tokens * (2 * hidden + 2 * wide) numbers.
void decode_bf16(const decoder *model, const decoder_step *step, bf16 *scratch, bf16 *logits) {
    int64_t tokens = step->tokens, hidden = model->hidden;
    bf16 *residual = scratch, *normed = residual + tokens * hidden;
    bf16 *wide = normed + tokens * hidden, *narrow = wide + tokens * model->wide;
    for (int64_t t = 0; t < tokens; t++)
        memcpy(residual + t * hidden, model->embedding + step->input_ids[t] * hidden,
               hidden * sizeof(bf16));
    const decoder_layer *layer = model->layers;
    rms_norm_bf16(residual, layer->input_norm, layer->input_eps, normed, tokens, hidden);
    for (int64_t i = 0; i < model->num_layers; i++, layer++) {
        int is_last = i + 1 == model->num_layers;
        linear_bf16(&layer->qkv, normed, wide, tokens);
        rope_store_bf16(wide, layer->cos_sin, step->positions, step->slots, layer->key_cache,
                        layer->value_cache, tokens, layer->q_heads, layer->kv_heads,
                        layer->head_dim, layer->head_dim, layer->block_size, layer->q_norm,
                        layer->k_norm, layer->head_eps);
        if (is_last && !step->num_sampling) return;
        paged_attention_bf16(wide, layer->qkv.out, layer->head_dim, narrow, layer->key_cache,
                             layer->value_cache, step->block_table, step->table_width,
                             step->query_start_loc, step->seq_lens, step->rows, layer->q_heads,
                             layer->kv_heads, layer->head_dim, layer->head_dim, layer->block_size,
                             layer->scaling, layer->window, layer->softcap, 0);
        if (is_last) {  // nobody attends any more: only the tokens that sample matter from here on
            take_rows(narrow, step->sampling, step->num_sampling, layer->output.in);
            take_rows(residual, step->sampling, step->num_sampling, hidden);
            tokens = step->num_sampling;
        }
        linear_bf16(&layer->output, narrow, normed, tokens);
        add_rms_norm_bf16(normed, residual, layer->post_norm, layer->post_eps, normed, tokens,
                          hidden);
        linear_bf16(&layer->gate_up, normed, wide, tokens);
        if (layer->is_gelu)
            gelu_tanh_and_mul_bf16(wide, narrow, tokens, model->intermediate);
        else
            silu_and_mul_bf16(wide, narrow, tokens, model->intermediate);
        linear_bf16(&layer->down, narrow, normed, tokens);
        add_rms_norm_bf16(normed, residual, is_last ? model->norm : layer[1].input_norm,
                          is_last ? model->eps : layer[1].input_eps, normed, tokens, hidden);
    }
    linear_bf16(&model->head, normed, logits, tokens);
}
