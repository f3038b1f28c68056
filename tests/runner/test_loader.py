"""A model directory that cannot be served is refused in one line that says what and where."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from aioserve.errors import ConfigError
from aioserve.model_source.info import ModelInfo
from aioserve.runner.attention.backend import ModelInputs, StepInputs
from aioserve.runner.attention.bridge import ATTN_IMPLEMENTATION
from aioserve.runner.cpu.attention import create_attention_backend
from aioserve.runner.cpu.kv_memory import expected_bytes_per_token
from aioserve.runner.cpu.load import load_on_cpu
from aioserve.runner.cpu.models import CpuPlace, load_model_on_cpu
from aioserve.runner.loader import AnyModel, find_body_and_head, prepare_model
from aioserve.runner.served_model import ServedModel
from tests.models import MODEL_KINDS, VOCAB_SIZE, edit_config, make_model
from tests.runner.driver import make_config

STEP = StepInputs(
    req_ids=["a"],
    rows=np.arange(1),
    input_ids=np.arange(5),
    positions=np.arange(5),
    slot_mapping=np.arange(5),
    query_start_loc=np.array([0, 5]),
    seq_lens=np.array([5]),
    block_table=np.zeros((1, 1), dtype=np.int32),
    sampling=np.arange(1),
    logits_indices=np.array([1, 4]),
)


def load(path: Path, **model: Any) -> ServedModel:
    config = make_config(path, **model).model
    return load_model_on_cpu(config, ModelInfo(config))


def refusal(path: Path, **model: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, **model)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1000  # transformers is wordy about unknown model types
    return message


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_model("llama", tmp_path)


def test_healthy_model_loads_without_a_word(llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loaded = load(llama, dtype="float32")
    assert loaded.kv_cache_spec.bytes_per_token == 3 * 2 * 2 * 16 * 4
    assert capfd.readouterr() == ("", "")


def test_truncated_weights_are_named(llama: Path) -> None:
    weights = llama / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert str(weights) in refusal(llama)


def test_damaged_weights_are_named(llama: Path) -> None:
    (llama / "model.safetensors").write_bytes(b"not weights")
    assert "model.safetensors" in refusal(llama)


def test_missing_weights_file_is_said(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    assert f"no *.safetensors weights in model directory {llama}" in refusal(llama)


def test_missing_shard_is_named(llama: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002-of-00002.safetensors" in refusal(llama)


def test_damaged_index_is_named(llama: Path) -> None:
    (llama / "model.safetensors.index.json").write_text("{")
    assert "model.safetensors.index.json" in refusal(llama)


def test_weights_of_too_few_layers_are_refused(llama: Path) -> None:
    message = refusal(edit_config(llama, num_hidden_layers=4))
    assert "LlamaForCausalLM" in message
    assert "model.layers.3" in message


def test_weights_of_another_shape_are_refused(llama: Path) -> None:
    message = refusal(edit_config(llama, intermediate_size=80))
    assert str(llama) in message
    assert "model.layers.0.mlp.down_proj.weight is [64, 96] in its files, and [64, 80]" in message


def test_bad_json_is_named(llama: Path) -> None:
    (llama / "config.json").write_text('{"model_type": "llama", ')
    assert "config.json" in refusal(llama)


def test_unknown_model_type_is_named(llama: Path) -> None:
    assert "llama99" in refusal(edit_config(llama, model_type="llama99"))


def test_an_unknown_activation_is_named_in_a_sentence(llama: Path) -> None:
    message = refusal(edit_config(llama, hidden_act="zzz"))
    assert message.endswith("nothing is known by the name 'zzz'")


def save_config(path: Path, model_type: str, **fields: Any) -> Path:
    """A directory with a configuration only: refused before any weight is read."""
    from transformers import AutoConfig

    AutoConfig.for_model(model_type, **fields).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("t5", "encoder-decoder"),
        ("bart", "encoder-decoder"),
        ("recurrent_gemma", "states in a way of their own"),
        ("vit", "not a causal language model"),
    ],
)
def test_unsupported_architectures_are_named(tmp_path: Path, model_type: str, reason: str) -> None:
    message = refusal(save_config(tmp_path, model_type))
    assert "unsupported architecture" in message
    assert reason in message


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("roberta", "positions do not count from 0"),
        ("openai-gpt", "nothing from one pass to the next"),
        ("cpmant", "something other than K and V"),
    ],
)
def test_models_whose_attention_is_out_of_reach_are_refused(
    tmp_path: Path, model_type: str, reason: str
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(
        model_type, vocab_size=64, intermediate_size=64, is_decoder=True, rotary_dim=16, **fields
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    assert reason in refusal(tmp_path, max_model_len=64)


def test_rope_that_depends_on_neighbours_is_refused_beyond_its_original_length(
    llama: Path,
) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    edit_config(llama, rope_parameters=rope | {"original_max_position_embeddings": 256})
    assert "max_model_len to at most 256" in refusal(llama)
    assert load(llama, max_model_len=256)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_window_that_is_only_in_the_mask_is_served_by_the_models_own_code_where_it_matters(
    dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "phimoe",
        vocab_size=64,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=2,
        max_position_embeddings=256,
        sliding_window=32,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert load(tmp_path, dtype=dtype).reads_rows
    assert "max_model_len of at most 32" in caplog.text
    assert not load(tmp_path, dtype=dtype, max_model_len=32).reads_rows


def test_what_is_kept_beside_the_cache_keeps_a_model_from_being_served(
    model_path: Callable[..., Path],
) -> None:
    """As by a convolution that nobody has heard of."""
    config = make_config(model_path("bloom"), dtype="float32").model
    module = AutoModelForCausalLM.from_pretrained(config.model).eval()
    assert prepare_model(module, config, ModelInfo(config), CpuPlace()).reads_rows
    norm = module.transformer.word_embeddings_layernorm
    norm.register_forward_hook(lambda _, args, out: out + 0.1 * F.pad(out[:, :-1], (0, 0, 1, 0)))
    with pytest.raises(ConfigError, match=r"BloomForCausalLM: .* pieces gives it other logits"):
        prepare_model(module, config, ModelInfo(config), CpuPlace())


def test_what_rows_are_read_from_is_not_kept_as_int8(model_path: Callable[..., Path]) -> None:
    config = make_config(model_path("bloom"), kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match=r"int8, which is not served for Bloom.* at a time"):
        load_on_cpu(config, ModelInfo(config.model))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": 9000}, "num_hidden_layers is 9000"),
        ({"num_attention_heads": -4}, "num_attention_heads is -4"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4, no multiple of"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"hidden_size": 10**6}, "hidden_size is 1000000"),
        ({"vocab_size": 10**8}, "vocab_size is 100000000"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"head_dim": -16}, "head_dim is -16"),
        ({"eos_token_id": [3, 512]}, "eos_token_id is 512"),
        ({"max_position_embeddings": 10**12}, "1,000,000,000,000 positions"),
        ({"max_position_embeddings": -1}, "max_position_embeddings"),
        ({"max_position_embeddings": "all"}, "max_position_embeddings"),
        ({"layer_types": ["full_attention", "guessed_attention", "x"]}, "guessed_attention"),
        ({"layer_types": ["full_attention"]}, "num_hidden_layers"),
        ({"layer_types": ["window_attention"] * 3}, "window_attention are not served"),
        ({"layer_types": ["chunked_attention"] * 3}, "attention_chunk_size is None"),
    ],
    ids=str,
)
def test_numbers_that_make_no_sense_are_named(
    llama: Path, fields: dict[str, Any], reason: str
) -> None:
    config = make_config(edit_config(llama, **fields))
    with pytest.raises(ConfigError) as caught:
        load_on_cpu(config, ModelInfo(config.model))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("kind", ["llama", "gemma4_text"])
def test_the_bytes_that_a_configuration_promises_are_those_of_the_cache(
    kind: str, model_path: Callable[..., Path]
) -> None:
    path = model_path(kind)
    found = load(path, dtype="float32").kv_cache_spec.bytes_per_token
    assert expected_bytes_per_token(ModelInfo(make_config(path).model).hf_config, 4) == found


def test_model_without_logits_to_keep_gives_the_same_logits(llama: Path) -> None:
    logits = []
    for takes_logits_to_keep in (True, False):
        loaded = load(llama, fused=False)
        assert isinstance(loaded, AnyModel)
        loaded._takes_logits_to_keep = takes_logits_to_keep
        backend = create_attention_backend(loaded.kv_cache_spec, 1, 8)
        backend.prepare(STEP)
        with torch.inference_mode():
            logits.append(loaded.forward(ModelInputs.of(STEP), backend))
    assert logits[0].shape == (2, VOCAB_SIZE)
    torch.testing.assert_close(*logits)


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_body_and_head_are_the_whole_model(kind: str, tmp_path: Path) -> None:
    loaded = load(make_model(kind, tmp_path), fused=False)
    halves = loaded.halves
    assert halves is not None
    backend = create_attention_backend(loaded.kv_cache_spec, 1, 8)
    backend.prepare(STEP)
    inputs = ModelInputs.of(STEP)
    with torch.inference_mode():
        logits = halves.logits(halves.hidden(inputs, backend))
        torch.testing.assert_close(logits, loaded.forward(inputs, backend))


def test_a_model_that_does_not_call_its_body_as_a_whole_is_not_taken_apart(tmp_path: Path) -> None:
    config = make_config(make_model("opt", tmp_path, word_embed_proj_dim=64, ffn_dim=96)).model
    module = AutoModelForCausalLM.from_pretrained(
        config.model, attn_implementation=ATTN_IMPLEMENTATION
    )
    ids = torch.arange(4)[None]
    assert find_body_and_head(module, input_ids=ids, position_ids=ids) is None
