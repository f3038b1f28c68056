"""GGUF files of every architecture that is read, with metadata that llama.cpp's converter wrote.

`model_source/gguf_written.json` holds what convert_hf_to_gguf.py of llama.cpp (as the package
llama-cpp-python 0.3.36 brings it) wrote for tiny models with unusual values: rotary bases, scales,
epsilons; for what has states or latent attention, conversion/ of llama.cpp in 2026. What it does
to weights is in `gguf_converted`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from tests.architectures.tiny import Case, make_config, make_model
from tests.gguf_converted import parts, stored
from tests.gguf_models import add_tokenizer

_FILE = Path(__file__).parent / "model_source" / "gguf_written.json"
#: Ends of names that the package gguf does not map for these models, and GGUF's.
_NAMES = {
    ".e_score_correction_bias": "exp_probs_b.bias",
    ".expert_bias": "exp_probs_b.bias",
    ".router.weight": "ffn_gate_inp.weight",
    ".experts.down_proj": "ffn_down_exps.weight",
    ".experts.down_proj_bias": "ffn_down_exps.bias",
    ".router.per_expert_scale": "ffn_down_exps.scale",
    ".router.scale": "ffn_gate_inp.scale",
    ".shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
    "mixer.dt_bias": "ssm_dt.bias",
    "mamba.dt_bias": "ssm_dt.bias",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "word_embeddings_layernorm.weight": "token_embd_norm.weight",
    "word_embeddings_layernorm.bias": "token_embd_norm.bias",
}
_NAMES_OF = {
    "bloom": {f"post_attention_layernorm.{end}": f"ffn_norm.{end}" for end in ("weight", "bias")},
    "gemma4": {".experts.gate_up_proj": "ffn_gate_up_exps.weight"},
    "nemotron_h_moe": {
        ".experts.up_proj": "ffn_up_exps.weight",
        ".experts.down_proj": "ffn_down_exps.weight",
    },
    "gpt-oss": {"post_attention_layernorm.weight": "post_attention_norm.weight"},
    "granite_swa": {
        ".sinks": "attn_sinks.weight",
        ".experts.gate_up_proj": "ffn_gate_up_exps.weight",
        ".input_linear.weight": "ffn_up_shexp.weight",
    },
    "hy_v3": {".e_score_correction_bias": "exp_probs_b"},
}


#: Of architectures that the package gguf does not know, one with the same names of tensors.
_NAMED_AS = {
    "cohere2moe": "dots1",
    "deepseek32": "glm-dsa",
    "granite_swa": "granite",
    "hy_v3": "dots1",
    "mellum": "qwen3moe",
}
#: Parameters that the file has in its metadata, a number for each layer (Apertus).
_NUMBERS = ".act_fn."
#: Parameters that are stacked in one tensor (Gemma 3n).
_STACKED = {
    "altup_projections": "altup_proj.weight",
    "altup_unembed_projections": "altup_unembd_proj.weight",
}


class Written(NamedTuple):
    """What the converter wrote for a model."""

    architecture: str
    model_type: str
    fields: dict[str, Any]  # of the configuration
    metadata: dict[str, Any]  # without the name of the architecture


WRITTEN = {name: Written(**case) for name, case in json.loads(_FILE.read_text()).items()}


def make_written(case: Written, folder: Path, kind: str | None = None) -> tuple[Path, Path]:
    """The model as a directory and as a file, of which matrices of layers are of the type `kind`
    where their rows are whole blocks of it.
    """
    from transformers import AutoModelForCausalLM

    directory, path = folder / "model", folder / "m.gguf"
    config = make_config(Case(case.model_type, "", tuple(case.fields.items())))
    make_model(config, directory)
    module = AutoModelForCausalLM.from_pretrained(directory)
    writer = gguf.GGUFWriter(path, case.architecture)
    add_metadata(writer, case.metadata)
    add_tokenizer(writer, config.vocab_size)
    for key in ("alpha_p", "alpha_n", "beta", "eps") if case.architecture == "apertus" else ():
        layers = [getattr(layer.mlp.act_fn, key).item() for layer in module.model.layers]
        writer.add_array(f"xielu.{key}", layers)
    for name, weights in _tensors(module, case):
        add_weights(writer, name, np.ascontiguousarray(weights, dtype=np.float32), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return directory, path


def add_weights(writer: gguf.GGUFWriter, name: str, weights: np.ndarray, kind: str | None) -> None:
    """A tensor, as float32 or in blocks."""
    found = None if kind is None else gguf.GGMLQuantizationType[kind]
    is_matrix = weights.ndim in (2, 3) and name.startswith("blk.") and ".ssm_" not in name
    if found is None or not is_matrix or weights.shape[-1] % gguf.GGML_QUANT_SIZES[found][0]:
        writer.add_tensor(name, weights)
    else:
        writer.add_tensor(name, gguf.quantize(weights, found), raw_dtype=found)


def add_metadata(writer: gguf.GGUFWriter, metadata: dict[str, Any]) -> None:
    """Keys under the name of the writer's architecture, in types as the converter takes."""
    for name, value in metadata.items():
        key = f"{writer.arch}.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)


def _tensors(module: Any, case: Written) -> Iterator[tuple[str, np.ndarray]]:
    config = module.config
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    named_as = _NAMED_AS.get(case.architecture, case.architecture)
    names = gguf.get_tensor_name_map(numbers[named_as], config.num_hidden_layers)
    own = _NAMES_OF.get(case.architecture, {})
    for name, tensor in module.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stack = next((own for own in _STACKED if f".{own}." in name), None)
        if stack is not None:
            if name.endswith(".0.weight"):
                whole = getattr(module.model, stack)
                yield _STACKED[stack], np.stack([part.weight.detach().numpy() for part in whole])
            continue
        if _NUMBERS in name:
            continue
        block = "".join(f"blk.{part}." for part in name.split(".") if part.isdecimal())
        weights = tensor.numpy()
        found = _known(name, own)
        is_whole = "kv_b_proj" in name and "attention.key_length_mla" not in case.metadata
        if found is None and not is_whole and (cut := parts(name, weights, config)):
            yield from ((block + end, part) for end, part in cut)
            continue
        found = found or _known(name, _NAMES)
        found = found and block + found
        rest = name.partition(".")[2]
        for theirs in (name, rest, f"backbone.{rest}"):
            found = found or names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        if found.endswith(("attn_sinks", "layer_output_scale", "altup_correct_scale")):
            found += ".weight"
        yield found, stored(found, weights, case.architecture, config)
    yield from _rope(config)


def _known(name: str, known: dict[str, str]) -> str | None:
    return next((ours for end, ours in known.items() if name.endswith(end)), None)


def _rope(config: Any) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of scaled rotary embeddings."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = getattr(config, "rope_parameters", None) or {}
    full = rope.get("full_attention", {})
    if full.get("rope_type") == "proportional":  # Gemma 4's: dimensions that do not turn
        half = config.per_layer_config[config.layer_types.index("full_attention")].head_dim // 2
        turned = int(half * full["partial_rotary_factor"])
        yield "rope_freqs.weight", np.array([1.0] * turned + [1e30] * (half - turned))
    if rope.get("rope_type") == "longrope":
        for which in ("long", "short"):
            yield f"rope_factors_{which}.weight", np.array(rope[f"{which}_factor"])
    if rope.get("rope_type") == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        turned = 2 * len(scaled)
        plain = rope["rope_theta"] ** -(np.arange(0, turned, 2) / turned)
        yield "rope_freqs.weight", plain / scaled.numpy()
