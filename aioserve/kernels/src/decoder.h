// The forward pass of a Llama-like decoder in one call: no Python between its operations, so an
// event loop in the same process runs on meanwhile. Included once per element type, after its
// kernels: T, NAME.

#ifndef DECODER
#define DECODER
typedef struct {
    linear qkv, output;
    linear gate_up, down;                // unless there are experts
    const experts *experts;              // or null
    const void *input_norm, *post_norm;  // [hidden]
    const void *q_norm, *k_norm;         // [head_dim], or null
    const float *cos_sin, *sinks;  // sinks [q_heads] or null
    void *key_cache, *value_cache;
    int64_t q_heads, kv_heads, head_dim, block_size;
    int64_t window;  // 0: none
    int64_t in_windows;  // its caches have the slots and the table of such layers
    int64_t is_gelu, is_int8;  // the activation; the cache
    int64_t in_bytes;          // attention by products of whole numbers, over a cache that is int8
    float input_eps, post_eps, head_eps, scaling;
    float softcap;  // 0: none
} decoder_layer;

typedef struct {
    const void *embedding;  // [vocabulary, hidden], or null
    const linear *table;    // then the same in blocks, an output per token
    const decoder_layer *layers;
    const void *norm;
    linear head;
    int64_t num_layers, hidden;
    int64_t wide;  // the most numbers that any operation makes of a token
    float eps;
    // Adds up what processes with a share of each weight have made of it; null: no shares.
    void (*add_up)(void *numbers, int64_t count);
} decoder;

typedef struct {
    const int64_t *input_ids, *positions, *slots;  // [tokens]
    const int64_t *query_start_loc, *seq_lens;     // [rows + 1], [rows]
    const int64_t *sampling;                       // [num_sampling], tokens whose logits are wanted
    const int32_t *block_table;                    // [rows, table_width]
    const int64_t *window_slots;                   // the same of layers that are `in_windows`
    const int32_t *window_table;
    int64_t tokens, rows, table_width, num_sampling;
    const adapter_rows *adapters, *sampling_adapters;  // of the tokens; of those of `sampling`
    int64_t num_adapters, num_sampling_adapters;
    const int64_t *tap_layers;  // [num_taps], layers whose input is wanted
    void *taps;                 // [num_taps, tokens, hidden]
    int64_t num_taps;
} decoder_step;

#endif

// Rows of a weight in blocks, [count, in].
int NAME(embed)(const linear *table, const int64_t *ids, T *out, int64_t count) {
    float *row = take(table->in * sizeof(float));
    if (!row) return OUT_OF_MEMORY;
    for (int64_t t = 0; t < count; t++) {
        unpack_row(table, ids[t], row);
        for (int64_t k = 0; k < table->in; k += W) STORE(out + t * table->in + k, load_f32(row + k));
    }
    free(row);
    return DONE;
}

static void NAME(take_rows)(T *x, const int64_t *indices, int64_t count, int64_t n) {
    for (int64_t i = 0; i < count; i++)  // indices rise, so nothing is overwritten that is needed
        if (indices[i] != i) memcpy(x + i * n, x + indices[i] * n, n * sizeof(T));
}

// A product, and what adapters add to it.
static int NAME(adapted)(const linear *layer, const adapter_rows *adapters, int64_t num_adapters,
                         int64_t place, const T *x, void *y, int64_t rows) {
    int status = NAME(linear)(layer, x, y, rows);
    if (num_adapters)
        status |= NAME(add_low_rank)(adapters, num_adapters, place, x, 0, y, layer->out,
                                     layer->is_wide);
    return status;
}

// Logits [num_sampling, vocabulary], float32 where the head is wide. `scratch`: tokens * (2 * hidden
// + 2 * wide) numbers. Without memory it goes on to its end: processes that hold the other shares
// wait for what it adds up.
int NAME(decode)(const decoder *model, const decoder_step *step, T *scratch, void *logits) {
    int64_t tokens = step->tokens, hidden = model->hidden;
    T *residual = scratch, *normed = residual + tokens * hidden;
    T *wide = normed + tokens * hidden, *narrow = wide + tokens * model->wide;
    int status = DONE;
    if (!model->embedding) status |= NAME(embed)(model->table, step->input_ids, residual, tokens);
    else for (int64_t t = 0; t < tokens; t++)
        memcpy(residual + t * hidden, (const T *)model->embedding + step->input_ids[t] * hidden,
               hidden * sizeof(T));
    const decoder_layer *layer = model->layers;
    const adapter_rows *adapters = step->adapters;
    int64_t num = step->num_adapters, place = 0;
    if (num)
        status |= NAME(add_low_rank)(adapters, num, 0, 0, step->input_ids, residual, hidden, 0);
    NAME(rms_norm)(residual, layer->input_norm, layer->input_eps, normed, tokens, hidden);
    for (int64_t i = 0; i < model->num_layers; i++, layer++) {
        int is_last = i + 1 == model->num_layers;
        for (int64_t k = 0; k < step->num_taps; k++)
            if (step->tap_layers[k] == i)
                memcpy((T *)step->taps + k * tokens * hidden, residual,
                       tokens * hidden * sizeof(T));
        status |= NAME(adapted)(&layer->qkv, adapters, num, place++, normed, wide, tokens);
        const int64_t *slots = layer->in_windows ? step->window_slots : step->slots;
        const int32_t *table = layer->in_windows ? step->window_table : step->block_table;
        NAME(rope_store)(wide, layer->cos_sin, step->positions, slots, layer->key_cache,
                        layer->value_cache, tokens, layer->q_heads, layer->kv_heads,
                        layer->head_dim, layer->head_dim, layer->block_size, layer->is_int8,
                        layer->q_norm, layer->k_norm, layer->head_eps);
        if (is_last && !step->num_sampling) return status;
        status |= (layer->in_bytes  ? NAME(paged_attention_bytes)
                   : layer->is_int8 ? NAME(paged_attention_int8)
                                    : NAME(paged_attention))(
            wide, layer->qkv.out, layer->head_dim, narrow, layer->key_cache, layer->value_cache,
            table, step->table_width, step->query_start_loc, step->seq_lens, step->rows,
            layer->q_heads, layer->kv_heads, layer->head_dim, layer->head_dim, layer->block_size,
            layer->scaling, layer->window, layer->softcap, layer->sinks, 0);
        if (is_last) {  // no layer attends any more: from here on only tokens that sample matter
            NAME(take_rows)(narrow, step->sampling, step->num_sampling, layer->output.in);
            NAME(take_rows)(residual, step->sampling, step->num_sampling, hidden);
            tokens = step->num_sampling;
            adapters = step->sampling_adapters, num = step->num_sampling_adapters;
        }
        status |= NAME(adapted)(&layer->output, adapters, num, place++, narrow, normed, tokens);
        if (model->add_up) model->add_up(normed, tokens * hidden);
        NAME(add_rms_norm)(normed, residual, layer->post_norm, layer->post_eps, normed, tokens,
                          hidden);
        if (layer->experts) {
            status |= NAME(apply_experts)(layer->experts, normed, normed, tokens);
            place += 2;
        } else {
            status |= NAME(adapted)(&layer->gate_up, adapters, num, place++, normed, wide, tokens);
            (layer->is_gelu ? NAME(gelu_tanh_and_mul) : NAME(silu_and_mul))(wide, narrow, tokens,
                                                                            layer->down.in);
            status |= NAME(adapted)(&layer->down, adapters, num, place++, narrow, normed, tokens);
        }
        if (model->add_up) model->add_up(normed, tokens * hidden);
        NAME(add_rms_norm)(normed, residual, is_last ? model->norm : layer[1].input_norm,
                          is_last ? model->eps : layer[1].input_eps, normed, tokens, hidden);
    }
    return status | NAME(adapted)(&model->head, adapters, num, place, normed, logits, tokens);
}
