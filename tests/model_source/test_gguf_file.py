"""A GGUF file is the model that it was made of, or refused in one line that says why."""

import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from aioserve.cli.main import main
from aioserve.config import ModelConfig
from aioserve.errors import ConfigError
from aioserve.features import gguf as gguf_source
from aioserve.model_source.info import ModelInfo
from aioserve.params import SamplingDefaults
from tests.gguf_models import CHAT_TEMPLATE, END_OF_TURN, EOS, write_gguf
from tests.models import VOCAB_SIZE, make_model

IDS = torch.tensor([[5, 80, 7, 300, 511, 2] * 20])


def info_of(path: Path, **settings: Any) -> ModelInfo:
    return ModelInfo(ModelConfig(model=str(path), **settings))


def load(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return info_of(path).source.load_module(dtype, torch.device("cpu"), "eager")


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def whole(llama: Path) -> Path:
    return write_gguf(llama, llama / "whole.gguf")


@torch.inference_mode()
def assert_same_model(module: Any, directory: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(
        directory, dtype=next(module.parameters()).dtype, attn_implementation="eager"
    )
    assert torch.equal(module(IDS).logits, expected(IDS).logits)


KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 16},  # no file says it: it is the size of a head
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_computes_what_its_directory_computes(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    directory = make_model(kind, tmp_path / "model", **KINDS[kind])
    assert_same_model(load(write_gguf(directory, tmp_path / "m.gguf"), dtype), directory)


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("name", ROPES)
def test_scaled_rotary_embeddings_are_those_of_the_directory(tmp_path: Path, name: str) -> None:
    rope = ROPES[name] | {"rope_theta": 500_000.0}
    directory = make_model("llama", tmp_path / "model", rope_parameters=rope)
    fields: dict[str, Any] = {"rope__scaling__type": name, "rope__scaling__factor": rope["factor"]}
    if name == "yarn":
        fields["rope__scaling__original_context_length"] = 64
    assert_same_model(load(write_gguf(directory, tmp_path / "m.gguf", **fields)), directory)


LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0}


@pytest.mark.parametrize(
    ("original", "high"),
    [(8192, 4.0), (4096, 4.0), (48, 4.0), (48, 7.5), (2_000_000, 4.0)],
    ids=["Llama 3", "another length", "a short one", "another bound", "beyond all waves"],
)
def test_divisors_of_frequencies_are_read_whatever_they_come_from(
    tmp_path: Path, original: int, high: float
) -> None:
    rope = LLAMA3 | {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
    directory = make_model("llama", tmp_path / "model", rope_parameters=rope)
    frequencies = 500.0 ** -(np.arange(0, 16, 2) / 16)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.from_pretrained(directory), None)
    found = load(write_divided(directory, tmp_path, frequencies / scaled.numpy()))
    assert torch.allclose(found.model.rotary_emb.inv_freq, scaled, rtol=1e-5)
    expected = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    with torch.inference_mode():
        assert torch.allclose(found(IDS).logits, expected(IDS).logits, atol=1e-3)


def test_divisors_of_no_rule_are_taken_as_they_are(tmp_path: Path) -> None:
    directory = make_model("llama", tmp_path / "model", rope_parameters={"rope_theta": 500.0})
    divisors = np.linspace(1, 3, 8)
    found = load(write_divided(directory, tmp_path, divisors)).model.rotary_emb.inv_freq
    expected = torch.from_numpy(500.0 ** -(np.arange(0, 16, 2) / 16) / divisors).float()
    assert torch.allclose(found, expected, rtol=1e-5)


def write_divided(directory: Path, folder: Path, divisors: np.ndarray) -> Path:
    def change(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
        tensors["rope_freqs.weight"] = divisors.astype(np.float32)

    return write_gguf(directory, folder / "m.gguf", change=change)


def test_the_parts_of_a_split_file_are_one_model(llama: Path, tmp_path: Path) -> None:
    parts = write_parts(llama, tmp_path)
    assert_same_model(load(parts[0]), llama)
    assert info_of(parts[0]).source.num_bytes(1) == info_of(llama).source.num_bytes(1)
    with pytest.raises(ConfigError, match=f"is part 2 of 3: name the first, {parts[0]}"):
        info_of(parts[1])
    shutil.copy(parts[1], parts[2])
    with pytest.raises(ConfigError, match=f"{parts[2]} says that it is part 1 of 3"):
        info_of(parts[0])
    parts[2].unlink()
    with pytest.raises(ConfigError, match=f"part 1 of 3, and beside it is no {parts[2].name}"):
        info_of(parts[0])


def write_parts(directory: Path, folder: Path) -> list[Path]:
    """As llama-gguf-split does: metadata in the first, no more than numbers in the others."""
    files = [folder / f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    for index, path in enumerate(files):

        def change(
            writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray], index: int = index
        ) -> None:
            total, names = len(tensors), sorted(tensors)[index::3]
            if index:
                writer.kv_data[0].clear()
            for key, value in (("no", index), ("count", 3), ("tensors.count", total)):
                writer.add_uint16(f"split.{key}", value)
            for name in set(tensors) - set(names):
                del tensors[name]

        write_gguf(directory, path, change=change)
    return files


def test_its_metadata_says_what_a_directory_says(llama: Path, whole: Path) -> None:
    info, config = info_of(whole), AutoConfig.from_pretrained(llama)
    assert info.vocab_size == VOCAB_SIZE == info.hf_config.vocab_size
    assert info.max_model_len == config.max_position_embeddings
    assert info.eos_token_ids == (EOS, END_OF_TURN)
    assert info.source.num_bytes(1) == sum(p.numel() for p in load(whole).parameters())
    tokenizer = info.tokenizer
    assert tokenizer.chat_template == CHAT_TEMPLATE
    ids = tokenizer.encode("the é 你 <|endoftext|>")  # the last is no token of this model
    assert max(ids) < VOCAB_SIZE
    assert tokenizer.decode(ids) == "the é 你 <|endoftext|>"


def test_files_beside_it_are_another_models(whole: Path, tmp_path: Path) -> None:
    shutil.copy(whole, tmp_path / "m.gguf")
    embedded = ModelInfo(ModelConfig()).source.path
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"):
        shutil.copy(embedded / name, tmp_path)
    info = info_of(tmp_path / "m.gguf")
    assert info.tokenizer.chat_template == CHAT_TEMPLATE
    assert (len(info.tokenizer), info.hf_config.vocab_size) == (VOCAB_SIZE, VOCAB_SIZE)


def test_weights_are_unpacked_one_tensor_at_a_time(tmp_path: Path) -> None:
    """No second copy: what numpy holds at once is a fraction of the file."""
    directory = make_model(
        "llama", tmp_path / "model", hidden_size=256, head_dim=64, intermediate_size=2048
    )
    path = write_gguf(directory, tmp_path / "m.gguf")
    source = info_of(path).source
    load(path)  # imports
    tracemalloc.start()
    source.load_module(torch.float32, torch.device("cpu"), "eager")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < path.stat().st_size / 2


def test_what_is_not_read_is_refused_by_name(llama: Path, tmp_path: Path) -> None:
    path = write_gguf(llama, tmp_path / "m.gguf", logit_scale=2.0, expert_count=0)
    assert refusal(path).startswith(f"{path}: aioserve does not read its logit_scale, without")


def test_clients_know_it_by_the_name_of_its_file() -> None:
    assert ModelConfig(model="a/SmolLM2.Q4_1.gguf").served_name == "SmolLM2.Q4_1"
    assert ModelConfig(model="a/m-00001-of-00003.gguf").served_name == "m"
    assert ModelConfig(model="a/m.gguf", served_model_name="mine").served_name == "mine"
    assert ModelConfig(model="a/b.c").served_name == "a/b.c"


def edit(**fields: Any) -> Any:
    """A change of the metadata: `general__type="mmproj"`."""

    def change(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
        for name, value in fields.items():
            key = name.replace("__", ".")
            writer.kv_data[0].pop(key, None)
            (writer.add_string if isinstance(value, str) else writer.add_uint16)(key, value)

    return change


def drop(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
    del tensors["blk.1.ffn_up.weight"]


def drop_embedding(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
    del tensors["token_embd.weight"]


def add_bias(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
    tensors["blk.0.attn_q.bias"] = np.ones(64, dtype=np.float32)


def cut_rows(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
    tensors["blk.0.ffn_up.weight"] = tensors["blk.0.ffn_up.weight"][:-1]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (edit(general__type="mmproj"), "is the image part of a model (mmproj)"),
        (edit(general__architecture="clip"), "is the image part of a model (mmproj)"),
        (edit(general__type="adapter"), "is an adapter (LoRA)"),
        (edit(split__count=2, split__no=0), "is part 1 of 2 and not named so: its name has to"),
        (
            edit(general__architecture="llama99"),
            "has the architecture 'llama99', which is not served as GGUF",
        ),
        (drop_embedding, "there is no token_embd.weight in it"),
        (drop, "1 weights of LlamaForCausalLM are not in"),
        (add_bias, "have no place in LlamaForCausalLM of transformers, first blk.0.attn_q.bias"),
        (cut_rows, "tensor blk.0.ffn_up.weight has the shape (95, 64)"),
        (edit(llama__rope__scaling__type="odd"), "rope.scaling.type has 'odd'; served are none,"),
        (edit(llama__block_count=60_000), "block_count has 60000 where a number from 1 to 16384"),
        (edit(llama__attention__key_length="wide"), "m.gguf: "),
    ],
)
def test_what_would_answer_wrongly_is_refused_by_name(
    llama: Path, tmp_path: Path, change: Any, reason: str
) -> None:
    assert reason in refusal(write_gguf(llama, tmp_path / "m.gguf", change=change))


def test_a_missing_package_is_named_with_its_install_line(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_source, "find_spec", lambda name: None)
    assert "needs the package gguf: pip install gguf" in refusal(whole)


@pytest.mark.parametrize("setting", [{"revision": "main"}, {"trust_remote_code": True}])
def test_a_setting_without_effect_is_refused(whole: Path, setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(ConfigError, match=f"model.{name} is .*, which has no effect"):
        info_of(whole, **setting)


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("m.gguf", b"PK\x03\x04 no model", "is not a GGUF file"),
        ("m.safetensors", b"12345678{}", "is not a GGUF file"),
        ("m.gguf", b"", "is not a GGUF file"),
        ("m.gguf", b"GGUF", "is cut short"),
        ("m.gguf", b"GGUF\x03\0\0\0" + b"\xff" * 16, "is cut short"),
        ("m.gguf", b"GGUF\0\0\0\x03", "is GGUF of version"),  # big endian
        ("m.gguf", None, "no file "),
    ],
)
def test_the_command_refuses_a_bad_file_in_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    data: bytes | None,
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if data is not None:
        Path(name).write_bytes(data)
    assert main(["--model", name, "--port", "0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("aioserve: error: ")
    assert f"{reason}" in line
    assert name in line


def test_a_directory_with_a_file_in_it_is_told_which_to_name(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ConfigError, match=f"a GGUF file is named itself: {tmp_path}/m.gguf"):
        info_of(tmp_path)


@pytest.mark.parametrize(
    ("way", "pieces"),
    [
        ("gpt-2", ["It", "'s", " 12345", " a", ",,!", "\n", "x"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", "5", " a", ",,!", "\n", "x"]),
        ("glm4", ["It", "'s", " ", "123", "45", " a", ",,!\n", "x"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", " a", ",,!\n", "x"]),
        ("seed-coder", ["It", "'s", " ", "1", "2", "3", "4", "5", " a", ",,!", "\n", "x"]),
        ("hunyuan-dense", ["It", "'s", " ", "123", "45", " a", ",,!\n", "x"]),
        ("deepseek-llm", ["It", "'", "s", " ", "1", "2", "3", "4", "5", " a", ",,!", "\n", "x"]),
        ("falcon", ["It", "'", "s", " ", "123", "45", " a", ",,!", "\n", "x"]),
    ],
)
def test_text_is_split_as_the_file_states(
    llama: Path, tmp_path: Path, way: str, pieces: list[str]
) -> None:
    path = write_gguf(llama, tmp_path / "m.gguf", change=edit(tokenizer__ggml__pre=way))
    splitter = info_of(path).tokenizer.backend_tokenizer.pre_tokenizer
    found = [piece for piece, _ in splitter.pre_tokenize_str("It's 12345 a,,!\nx")]
    assert [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece in found] == pieces


def test_an_unknown_way_to_split_text_is_refused(llama: Path, tmp_path: Path) -> None:
    path = write_gguf(llama, tmp_path / "m.gguf", change=edit(tokenizer__ggml__pre="of-mine"))
    with pytest.raises(ConfigError, match=r"m\.gguf: tokenizer.ggml.pre is 'of-mine', a way to"):
        _ = info_of(path).tokenizer


def test_the_sampling_that_a_file_recommends_is_read(llama: Path, tmp_path: Path) -> None:
    def recommend(writer: gguf.GGUFWriter, _: Any) -> None:
        writer.add_float32("general.sampling.temp", 0.25)
        writer.add_int32("general.sampling.top_k", 20)

    path = write_gguf(llama, tmp_path / "m.gguf", change=recommend)
    assert info_of(path).sampling_defaults == SamplingDefaults(temperature=0.25, top_k=20)


def edit_any(fields: dict[str, Any]) -> Any:
    """A change of keys to values of any type."""

    def change(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
        for key, value in fields.items():
            writer.kv_data[0].pop(key, None)
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))

    return change


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("context_length", 0, "a whole number of at least 1"),
        ("embedding_length", 0, "a whole number of at least 1"),
        ("block_count", 0, "a whole number of at least 1"),
        ("attention.key_length", 0, "a whole number of at least 1"),
        ("attention.head_count", 1.5, "a whole number of at least 0"),
        ("feed_forward_length", "wide", "a whole number of at least 0"),
        ("attention.layer_norm_rms_epsilon", 0.0, "a number above 0"),
        ("attention.layer_norm_rms_epsilon", float("nan"), "a number above 0"),
        ("rope.freq_base", 0.0, "a number above 0"),
        ("rope.freq_base", float("inf"), "a number above 0"),
        ("rope.freq_base", "1e4", "a number above 0"),
        ("rope.scaling.factor", -2.0, "a number of at least 0"),
    ],
)
def test_values_that_no_model_can_have_are_refused_by_key_value_and_what_is_expected(
    llama: Path, tmp_path: Path, key: str, value: Any, expected: str
) -> None:
    change = {f"llama.{key}": value}
    path = write_gguf(llama, tmp_path / "m.gguf", change=edit_any(change))
    assert refusal(path) == f"{path}: {key} is {value!r}, which must be {expected}"
