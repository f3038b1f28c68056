"""Who is fused, who is not and why, and that fused logits are those of the modules."""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from aioserve import kernels
from aioserve.kernels.tokens import LogitMaxima
from aioserve.model_source.info import ModelInfo
from aioserve.runner.attention.backend import ModelInputs, StepInputs
from aioserve.runner.cpu.attention import create_attention_backend
from aioserve.runner.cpu.fused import WholeDecoder
from aioserve.runner.cpu.models import load_model_on_cpu
from aioserve.runner.fused import fuse as fused
from aioserve.runner.fused.decoder import FusedDecoder
from aioserve.runner.fused.model import FusedModel
from aioserve.runner.fused.ops import ExpertWeights, Linear, NotFusedError, Ops
from aioserve.runner.fused.recognize import ExpertParts, _rms_norm, find_experts
from aioserve.runner.loader import AnyModel
from aioserve.runner.served_model import ServedModel
from tests.models import VOCAB_SIZE, make_model
from tests.runner.driver import Driver, make_config
from tests.slow import mostly_slow
from tests.variants import DTYPE, needs_kernels

BLOCK_SIZE = 16
ROUNDING = {"float32": 1e-5, "float16": 0.02, "bfloat16": 0.1}  # of logits, to those of the modules
MakeDriver = Callable[..., Driver]
Generate = Callable[..., list[int]]
Fields = dict[str, Any]


def load(path: Path, **model: Any) -> ServedModel:
    config = make_config(path, **model).model
    return load_model_on_cpu(config, ModelInfo(config))


def one_prompt(length: int, sampling: list[int]) -> StepInputs:
    """A step of one request that wants logits at some of its tokens."""
    positions = np.arange(length)
    return StepInputs(
        req_ids=["a"],
        rows=np.arange(1),
        input_ids=np.random.default_rng(0).integers(0, VOCAB_SIZE, length),
        positions=positions,
        slot_mapping=positions,
        query_start_loc=np.array([0, length]),
        seq_lens=np.array([length]),
        block_table=np.arange(-(-length // BLOCK_SIZE), dtype=np.int32)[None],
        sampling=np.arange(len(sampling)),
        logits_indices=np.array(sampling, dtype=np.int64),
    )


@torch.inference_mode()
def compute(model: ServedModel, step: StepInputs) -> Tensor:
    backend = create_attention_backend(
        model.kv_cache_spec, step.block_table.shape[1] + 1, BLOCK_SIZE
    )
    backend.prepare(step)
    return model.forward(ModelInputs.of(step), backend)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # two would mostly wait for each other on tiny tensors


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AIOSERVE_KERNELS", "off")
    kernels.load_kernels.cache_clear()
    yield
    kernels.load_kernels.cache_clear()


LLAMA_LIKE: dict[str, tuple[str, Fields]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, gelu": ("llama", {"hidden_act": "gelu"}),
    "llama, gelu by tanh": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama, odd sizes": ("llama", {"hidden_size": 60, "intermediate_size": 70, "head_dim": 12}),
    "llama 3 rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "yarn, which scales attention": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "smollm3": ("smollm3", {}),
}
WITH_EXPERTS: dict[str, tuple[str, Fields]] = {
    "mixtral": ("mixtral", {}),
    "experts with biases, and sinks": ("gpt_oss", {}),
    "many experts, whose shares are of all, and a dense layer": (
        "qwen3_moe",
        {
            "num_experts": 33,
            "num_experts_per_tok": 20,
            "moe_intermediate_size": 48,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
        },
    ),
}


@pytest.mark.parametrize(
    "case", [*LLAMA_LIKE, *(pytest.param(case, marks=needs_kernels) for case in WITH_EXPERTS)]
)
def test_fused_logits_are_those_of_the_modules(case: str, tmp_path: Path) -> None:
    kind, fields = (LLAMA_LIKE | WITH_EXPERTS)[case]
    make_model(kind, tmp_path, **fields)
    step = one_prompt(70, sampling=[0, 30, 69])
    model = load(tmp_path)
    assert isinstance(model, FusedModel)
    found, expected = compute(model, step), compute(load(tmp_path, fused=False), step)
    if DTYPE == "float32":
        # sums in another order, through three layers; logits are up to 10
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    else:  # they and the modules round some hundred times, at other places
        assert relative_error(found, expected) < ROUNDING[DTYPE]


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize(
    ("kind", "dtype"),
    mostly_slow(
        product(["qwen2", "qwen3", "smollm3"], ["float32", "bfloat16", "float16"]),
        but=[("qwen2", "float16"), ("qwen3", "bfloat16"), ("smollm3", "float32")],
    ),
)
def test_plain_torch_serves_where_there_are_no_kernels(
    kind: str, dtype: str, tmp_path: Path
) -> None:
    make_model(kind, tmp_path)
    step = one_prompt(70, sampling=[0, 30, 69])
    model = load(tmp_path, dtype=dtype)
    assert isinstance(model, FusedModel)
    expected = compute(load(tmp_path, dtype=dtype, fused=False), step)
    assert relative_error(compute(model, step), expected) < ROUNDING[dtype]


NOT_LLAMA_LIKE: list[tuple[str, Fields, str]] = [
    ("gemma2", {}, "Gemma2Model.embed_tokens is no Embedding"),
    ("olmoe", {}, "OlmoeAttention normalizes more than heads"),
    ("minimax_m2", {"num_local_experts": 16}, "MiniMaxM2TopKRouter gives other things"),
    ("mixtral", {"hidden_act": "gelu"}, "the activation gelu of its experts is not served"),
    ("mixtral", {"intermediate_size": 40}, "of a CPU alone: rows of 40 are not served, only mul"),
    ("mixtral", {"head_dim": 24}, "of a CPU alone: heads of 24 are not served, only multiples"),
    ("phi", {}, "PhiModel has no norm"),
    ("phi3", {}, "Phi3DecoderLayer has resid_attn_dropout"),
    ("olmo", {}, "OlmoLayerNorm is no RMS norm"),
    ("olmo2", {}, "Olmo2DecoderLayer has no input_layernorm"),
    ("helium", {}, "layer 0 is not that of Llama"),  # turns neighbours, not halves
    ("ernie4_5", {}, "layer 0 is not that of Llama"),  # likewise
    ("granite", {"residual_multiplier": 0.9}, "layer 0 is not that of Llama"),
    ("granite", {"embedding_multiplier": 2.0}, "its embedding is not a plain one"),
    ("granite", {"logits_scaling": 2.0}, "the head is not that of Llama"),
    ("llama", {"hidden_act": "relu"}, "its activation ReLU is not served"),
]


@pytest.mark.parametrize(("kind", "fields", "reason"), NOT_LLAMA_LIKE)
def test_other_models_run_as_they_are_and_the_log_says_why(
    kind: str, fields: Fields, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    make_model(kind, tmp_path, **fields)
    model = load(tmp_path)
    assert isinstance(model, AnyModel)
    (message,) = [r.message for r in caplog.records if r.name == "aioserve.runner.loader"]
    assert reason in message
    step = one_prompt(30, sampling=[29])
    # in two-byte types their heads may sum in another order
    torch.testing.assert_close(
        compute(model, step), compute(load(tmp_path, fused=False), step), rtol=1e-4, atol=1e-4
    )


def test_norm_that_adds_one_to_its_weight_is_not_that_of_llama() -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    with pytest.raises(NotFusedError, match="GemmaRMSNorm is not the RMS norm of Llama"):
        _rms_norm(GemmaRMSNorm(32), torch.float32)


@pytest.mark.parametrize(
    ("wrong", "dtype"),
    mostly_slow(
        product(["qkv", "output", "down", "norm"], ["float32", "bfloat16"]),
        but=[("qkv", "float32"), ("output", "bfloat16"), ("down", "float32"), ("norm", "bfloat16")],
    ),
)
def test_one_wrong_layer_is_found_and_nothing_is_lost(
    wrong: str, dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A tenth more in one of the products, or in one norm, of the last layer."""
    make_model("llama", tmp_path, num_hidden_layers=3)
    fuse_layer = fused._fuse_layer

    def spoil(parts: Any, ops: Ops, ranks: None) -> Any:
        layer = fuse_layer(parts, ops, ranks)
        if parts.attention.index != 2:
            return layer
        if wrong == "norm":
            norm = layer.post_norm
            return replace(layer, post_norm=norm._replace(weight=norm.weight * 1.1))
        owner = layer.mlp if wrong == "down" else layer
        linear: Linear = getattr(owner, wrong)
        spoilt = replace(owner, **{wrong: lambda x: linear(x) * 1.1})
        return replace(layer, mlp=spoilt) if wrong == "down" else spoilt

    monkeypatch.setattr(fused, "_fuse_layer", spoil)
    caplog.set_level("INFO")
    model = load(tmp_path, dtype=dtype)
    assert isinstance(model, AnyModel)
    assert "layer 2 is not that of Llama" in caplog.text
    step = one_prompt(30, sampling=[29])
    expected = compute(load(tmp_path, fused=False, dtype=dtype), step)
    assert torch.equal(compute(model, step), expected)


@needs_kernels
@pytest.mark.parametrize(
    ("wrong", "dtype"),
    mostly_slow(
        product(["an expert", "a bias", "the router", "the shares"], ["float32", "bfloat16"]),
        but=[
            ("an expert", "bfloat16"),
            ("a bias", "bfloat16"),
            ("the router", "float32"),
            ("the shares", "float32"),
        ],
    ),
)
def test_a_wrong_part_of_experts_is_found(
    wrong: str, dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A fifth more in the weights of one of four experts or of the router, another bias."""
    make_model("gpt_oss", tmp_path, num_hidden_layers=2)
    weights, find = ExpertParts.weights, find_experts

    def spoil_one(parts: ExpertParts) -> Iterator[ExpertWeights]:
        for number, own in enumerate(weights(parts)):
            if number == 2 and wrong == "an expert":
                yield own._replace(down=own.down * 1.2)
            elif number == 2 and wrong == "a bias":
                yield own._replace(down_bias=torch.full_like(own.down[:, 0], 2))
            else:
                yield own

    def spoil(mlp: Any) -> ExpertParts:
        parts = find(mlp)
        router = parts.router
        if wrong == "the router":
            router = router._replace(weight=router.weight * 1.2)
        elif wrong == "the shares":
            router = router._replace(of_all=True)
        return replace(parts, router=router)

    monkeypatch.setattr(ExpertParts, "weights", spoil_one)
    monkeypatch.setattr("aioserve.runner.fused.recognize.find_experts", spoil)
    caplog.set_level("INFO")
    assert isinstance(load(tmp_path, dtype=dtype), AnyModel)
    assert "layer 0 is not that of Llama" in caplog.text


@needs_kernels
def test_near_ties_of_experts_that_roundings_decide_are_no_difference(tmp_path: Path) -> None:
    """Of 128 logits in bfloat16 the first two are often equal, or nearly so."""
    make_model(
        "qwen3_moe",
        tmp_path,
        num_hidden_layers=2,
        num_experts=128,
        num_experts_per_tok=1,
        moe_intermediate_size=128,
    )
    assert isinstance(load(tmp_path, dtype="bfloat16"), FusedModel)


@pytest.mark.parametrize(
    ("dtype", "inner"), [("float32", 30), ("bfloat16", 28), ("float16", 36), ("bfloat16", 40)]
)
def test_experts_of_any_width_compute_what_they_do_in_float32(
    dtype: str, inner: int, tmp_path: Path
) -> None:
    make_model("mixtral", tmp_path, intermediate_size=inner, num_hidden_layers=2)
    step = one_prompt(9, sampling=[0, 4, 8])
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, experts_implementation="eager"
    )
    with torch.inference_mode():
        logits = reference(torch.from_numpy(step.input_ids)[None]).logits[0, step.logits_indices]
    found = compute(load(tmp_path, dtype=dtype), step)
    assert relative_error(found, logits) < ROUNDING[dtype]


@pytest.mark.usefixtures("without_kernels")
def test_experts_run_as_they_are_where_there_are_no_kernels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_model("mixtral", tmp_path)
    caplog.set_level("INFO")
    assert isinstance(load(tmp_path), AnyModel)
    assert (
        "its experts are served by the kernels of a CPU alone: AIOSERVE_KERNELS=off" in caplog.text
    )


def test_compiled_loop_that_differs_from_its_operations_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("llama", tmp_path)
    model = load(tmp_path, dtype="bfloat16")
    assert isinstance(model, FusedModel)
    if not isinstance(model.decoder, WholeDecoder):
        pytest.skip("the kernels of this CPU have no compiled loop")
    monkeypatch.setattr(WholeDecoder, "forward", lambda *args: FusedDecoder.forward(*args) * 1.01)
    model = load(tmp_path, dtype="bfloat16")
    assert isinstance(model, FusedModel)
    assert type(model.decoder) is FusedDecoder
    assert "compiled loop" in caplog.text


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(
    "kind", mostly_slow(["llama", "qwen2", "qwen3", "mistral", "smollm3"], but=["qwen2", "smollm3"])
)
def test_bfloat16_is_as_near_to_float32_as_the_modules_are(kind: str, tmp_path: Path) -> None:
    make_model(kind, tmp_path, num_hidden_layers=6, initializer_range=0.05)
    step = one_prompt(200, sampling=list(range(200)))
    exact = compute(load(tmp_path, dtype="float32", fused=False), step)
    theirs = relative_error(compute(load(tmp_path, dtype="bfloat16", fused=False), step), exact)
    model = load(tmp_path, dtype="bfloat16")
    assert isinstance(model, FusedModel)
    ours = relative_error(compute(model, step), exact)
    # both round some hundred times, at other places: a tenth is chance. 0.05 is a cosine of 0.999
    assert ours < 1.1 * theirs
    assert ours < 0.05


def test_step_in_which_nobody_samples_only_fills_the_cache(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    model = load(tmp_path)
    assert compute(model, one_prompt(40, sampling=[])).shape == (0, VOCAB_SIZE)


def test_weights_are_not_kept_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("llama", tmp_path)
    found: list[torch.nn.Module] = []
    fuse = fused.fuse
    monkeypatch.setattr(
        "aioserve.runner.loader.fuse", lambda *args: (found.append(args[1]), fuse(*args))[1]
    )
    model = load(tmp_path)
    left = sum(parameter.numel() for parameter in found[0].parameters())
    # embedding, head and norms may be there until the module is dropped
    assert left <= 2 * VOCAB_SIZE * 64 + 7 * 64 < model.num_parameters / 1.5


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_tokens_equal_generate_without_kernels(
    kind: str, make_driver: MakeDriver, generate_reference: Generate
) -> None:
    driver = make_driver(kind)
    prompt = [(7 * i) % VOCAB_SIZE for i in range(50)]
    driver.add("a", prompt)
    driver.step({"a": 20})
    assert driver.generate("a", 12) == generate_reference(kind, prompt, 12)


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])  # qwen3: its head is tied to its embedding
def test_one_call_notes_the_largest_of_its_logits(
    kind: str, quantization: str | None, dtype: str, tmp_path: Path
) -> None:
    model = load(make_model(kind, tmp_path / "model"), dtype=dtype, quantization=quantization)
    for num_rows in (1, 20, 3):
        logits = compute(model, one_prompt(25, list(range(num_rows))))
        known = LogitMaxima.of(logits)
        assert known is not None
        assert known[:3] == (logits.data_ptr(), *logits.shape)
        num = -(-VOCAB_SIZE // known.width)
        memory = (ctypes.c_float * (num * num_rows)).from_address(known.maxima)
        whole = torch.nn.functional.pad(logits, (0, -VOCAB_SIZE % known.width), value=-torch.inf)
        expected = whole.view(num_rows, num, known.width).amax(-1).T.flatten()
        assert list(memory) == expected.tolist()
    assert compute(model, one_prompt(25, [])).shape == (0, VOCAB_SIZE)
