"""Tiny GGUF files, made of the directories that `tests.models` writes.

Knows what llama.cpp's converter does to names, rows and metadata; the weights stay float32, or are
stored as quantized types.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file
from transformers import AutoConfig
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.blocks import random_weight

CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
EOS, END_OF_TURN = 7, 9

Change = Callable[[gguf.GGUFWriter, dict[str, np.ndarray]], None]


def write_gguf(
    directory: Path,
    path: Path,
    *,
    architecture: str | None = None,
    change: Change | None = None,
    kind_of: Callable[[str], str] | None = None,
    **fields: Any,
) -> Path:
    """The model of `directory` as a file. `fields` go into the metadata, under the architecture's
    name, and `change` may edit the tensors, by GGUF name, before they are written. Matrices, also
    those of experts, become of the type that `kind_of` says, by GGUF name.
    """
    config = AutoConfig.from_pretrained(directory)
    kind = architecture or config.model_type.replace("_moe", "moe")
    writer = gguf.GGUFWriter(path, kind)
    writer.add_type("model")
    _add_shape(writer, config, fields)
    add_tokenizer(writer, config.vocab_size)
    tensors = _tensors(directory, config)
    if change is not None:
        change(writer, tensors)
    for name, weights in tensors.items():
        kind = None
        if kind_of is not None and weights.ndim in (2, 3) and "gate_inp" not in name:
            kind = gguf.GGMLQuantizationType[kind_of(name)]
            weights = _quantized(weights, kind)
        writer.add_tensor(name, weights, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_shape(writer: gguf.GGUFWriter, config: Any, fields: Mapping[str, Any]) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_size = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    writer.add_rope_dimension_count(head_size)
    writer.add_key_length(head_size)
    if experts := getattr(config, "num_experts", None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    for name in ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping"):
        if value := getattr(config, name, None):
            getattr(writer, f"add_{name}")(value)
    for name, value in fields.items():
        key = f"{writer.arch}.{name.replace('__', '.')}"
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)


def add_tokenizer(writer: gguf.GGUFWriter, size: int) -> None:
    """Bytes, one merged pair, and words that no text has."""
    tokens = [*bytes_to_unicode().values(), "th"]
    tokens += [f"<|{number}|>" for number in range(len(tokens), size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens[:size])
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(EOS)
    writer.add_eot_token_id(END_OF_TURN)
    writer.add_chat_template(CHAT_TEMPLATE)


def _tensors(directory: Path, config: Any) -> dict[str, np.ndarray]:
    architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    architecture = architectures[config.model_type.replace("_moe", "moe")]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    tensors = {}
    for name, weights in _with_experts_together(load_file(directory / "model.safetensors")):
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        if config.model_type == "llama" and (".attn_q." in found or ".attn_k." in found):
            heads = config.num_attention_heads
            if ".attn_k." in found:
                heads = config.num_key_value_heads
            pairs = weights.reshape(heads, 2, weights.shape[0] // heads // 2, -1)
            weights = pairs.swapaxes(1, 2).reshape(weights.shape)
        if config.model_type == "gemma2" and found.endswith("norm.weight"):
            weights = weights + 1
        tensors[found] = weights.astype(np.float32)
    return tensors


def _quantized(weights: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Bytes; of types that the package gguf cannot write, random ones of about the same size."""
    try:
        return gguf.quantize(weights, kind)
    except NotImplementedError:
        shape = (weights.size // weights.shape[-1], weights.shape[-1])
        found = gguf.dequantize(random_weight(kind.name, *shape).data.numpy(), kind).std()
        data = random_weight(kind.name, *shape, weights.std() / found).data.numpy()
        return data.reshape(*weights.shape[:-1], -1)


def _with_experts_together(
    weights: Mapping[str, np.ndarray],
) -> Iterator[tuple[str, np.ndarray]]:
    """Those of a layer in one array, as the file has them; everything else as it is."""
    experts = defaultdict(list)
    for name in sorted(weights):
        before, found, after = name.partition(".experts.")
        if found:  # NUMBER.gate_proj.weight
            experts[f"{before}.experts.{after.partition('.')[2]}"].append(weights[name])
        else:
            yield name, weights[name]
    for name, parts in experts.items():
        yield name, np.stack(parts)
