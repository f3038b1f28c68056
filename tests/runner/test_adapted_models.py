"""What a batch of adapters says is what their merged weights say, whichever tier computes it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from aioserve.errors import ConfigError
from aioserve.features.lora.peft_directory import read_adapter
from aioserve.features.lora.products import LowRankTokens
from aioserve.kernels.tokens import LogitMaxima
from aioserve.params import PoolingParams, SamplingParams
from aioserve.runner.attention.backend import LayerAttention, ModelInputs
from aioserve.runner.cpu.fused import WholeDecoder
from aioserve.runner.fused.decoder import FusedDecoder
from aioserve.runner.loader import named_dtype
from aioserve.scheduler.output import NewRequestData
from tests.adapters import ALL_LINEAR, ATTENTION, make_adapter, merge
from tests.greedy import GreedyReference
from tests.runner.driver import Driver
from tests.slow import mostly_slow
from tests.variants import DTYPE, needs_kernels

EVERYTHING = (*ALL_LINEAR, "embed_tokens", "lm_head")
PROMPTS = [[5, 6, 7, 8, 9], [100, 3], [401], [5, 6, 7, 8, 9]]
NUM_TOKENS = 12


class AdaptedDriver(Driver):
    """Requests have the adapter that their id begins with."""

    def __init__(self, driver: Driver, adapters: dict[str, Path]) -> None:
        self.__dict__ = driver.__dict__
        for name, path in adapters.items():
            adapters = self.runner.adapters
            adapters.load(name, adapters.put(read_adapter(path)))

    def new_request_data(self, request_id: str) -> NewRequestData:
        data = super().new_request_data(request_id)
        name, _, _ = request_id.partition("-")
        return msgspec.structs.replace(data, adapter_id="" if name == "none" else name)


@pytest.fixture(scope="session")
def adapted(
    model_path: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, tuple[Path, Path]]]:
    """`adapted(kind)`: two adapters of a model by name, each with the model that has it merged."""
    made: dict[str, dict[str, tuple[Path, Path]]] = {}

    def make(kind: str) -> dict[str, tuple[Path, Path]]:
        if kind not in made:
            base, path = model_path(kind), tmp_path_factory.mktemp(f"adapters-{kind}")
            all_of_it = {"gemma2": ALL_LINEAR, "mixtral": ATTENTION}.get(kind, EVERYTHING)
            wide = make_adapter(base, path / "wide", seed=1, rank=5, targets=all_of_it)
            narrow = make_adapter(
                base,
                path / "narrow",
                seed=2,
                targets=("q_proj", "v_proj"),
                use_rslora=True,
                rank_pattern={"layers.1.self_attn.q_proj": 17},
                alpha_pattern={"v_proj": 3},
            )
            made[kind] = {
                adapter.name: (adapter, merge(base, adapter, path / f"{adapter.name}-merged"))
                for adapter in (wide, narrow)
            }
        return made[kind]

    return make


@pytest.fixture(scope="session")
def expected(
    model_path: Callable[..., Path], adapted: Callable[..., dict[str, tuple[Path, Path]]]
) -> Callable[..., dict[str, Any]]:
    """`expected(kind, dtype)`: what equals the output, by request."""
    made: dict[tuple[str, str], dict[str, Any]] = {}

    def make(kind: str, dtype: str = DTYPE) -> dict[str, Any]:
        found = made.setdefault((kind, dtype), {})
        if not found:
            merged = {name: path for name, (_, path) in adapted(kind).items()}
            for name, path in {"none": model_path(kind), **merged}.items():
                reference = GreedyReference(path, named_dtype(dtype))
                for number, prompt in enumerate(PROMPTS):
                    found[f"{name}-{number}"] = reference.tokens(prompt, NUM_TOKENS)
        return found

    return make


def generate_all(driver: Driver, names: list[str]) -> dict[str, list[int]]:
    """Staggered: prompts come beside those that decode, and are cut."""
    for name in names:
        driver.add(name, PROMPTS[int(name.partition("-")[2])])
    for number in range(NUM_TOKENS * 4):
        counts = {
            name: min(driver.sequences[name].lacking, 3)
            for name in names[: number + 2]
            if len(driver.sequences[name].output) < NUM_TOKENS
        }
        if not counts:
            break
        driver.step(counts)
    return {name: driver.sequences[name].output for name in names}


NAMES = ["wide-0", "none-0", "narrow-0", "wide-1", "narrow-1", "none-2", "wide-2", "narrow-3"]


@pytest.mark.parametrize(
    "kind",
    mostly_slow(
        ["llama", "qwen3", "llama, not fused", "gemma2", "mixtral"], but=["llama", "gemma2"]
    ),
)
def test_a_mixed_batch_says_what_merged_weights_say(
    kind: str,
    make_driver: Callable[..., Driver],
    adapted: Callable[..., Any],
    expected: Callable[..., dict[str, Any]],
) -> None:
    kind, *others = kind.split(",")
    adapters = {name: path for name, (path, _) in adapted(kind).items()}
    driver = AdaptedDriver(make_driver(kind, fused=not others), adapters)
    found = generate_all(driver, NAMES)
    wanted = expected(kind)
    assert found == {name: wanted[name] for name in NAMES}
    assert len({tuple(found[name]) for name in ("wide-0", "none-0", "narrow-0")}) == 3


@pytest.mark.parametrize("dtype", mostly_slow(["float32", "bfloat16", "float16"], but=["bfloat16"]))
def test_every_variant_of_the_kernels_does(
    variant: str,
    dtype: str,
    make_driver: Callable[..., Driver],
    adapted: Callable[..., Any],
    expected: Callable[..., dict[str, Any]],
) -> None:
    adapters = {name: path for name, (path, _) in adapted("llama").items()}
    driver = AdaptedDriver(make_driver("llama", dtype=dtype), adapters)
    found = generate_all(driver, NAMES)
    wanted = expected("llama", dtype)
    assert found == {name: wanted[name] for name in NAMES}


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
def test_prompts_are_told_and_pooled_by_their_adapter(
    fused: bool,
    make_driver: Callable[..., Driver],
    model_path: Callable[..., Path],
    adapted: Callable[..., Any],
) -> None:
    """Beside others, and with drafts none of which changes anything."""
    prompt = PROMPTS[0]
    adapters = {name: path for name, (path, _) in adapted("llama").items()}
    driver = AdaptedDriver(make_driver("llama", fused=fused, dtype="float32"), adapters)
    told = SamplingParams(temperature=0, prompt_logprobs=1, logprobs=1)
    names = ["wide", "none", "narrow"]
    for name in names:
        driver.add(f"{name}-told", prompt, told)
        driver.add(f"{name}-pooled", prompt, pooling=PoolingParams(pooling="last", normalize=False))
    result = driver.step()
    for name in names:
        path = model_path("llama") if name == "none" else adapted("llama")[name][1]
        reference = GreedyReference(path, torch.float32)
        with torch.inference_mode():
            logits = reference._model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        of_prompt = result.prompt_logprobs[f"{name}-told"]
        for place, entry in enumerate(of_prompt):
            assert entry.logprob == pytest.approx(float(logits[place, prompt[place + 1]]), abs=1e-3)
        vector = driver.sequences[f"{name}-pooled"].vector
        np.testing.assert_allclose(vector, reference.states(prompt)[-1].numpy(), atol=1e-3)


@needs_kernels
def test_one_compiled_call_gives_what_the_loop_gives_to_the_bit(
    make_driver: Callable[..., Driver],
    adapted: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled, num_compared = WholeDecoder.forward, 0

    def compare(self: WholeDecoder, inputs: ModelInputs, attention: LayerAttention) -> torch.Tensor:
        nonlocal num_compared
        loop = FusedDecoder.forward(self, inputs, attention)
        with monkeypatch.context() as without:
            without.delattr(FusedDecoder, "forward")  # nor is it asked to help
            found = compiled(self, inputs, attention)
        assert torch.equal(found, loop)
        assert (LogitMaxima.of(found) is None) == (inputs.adapters is not None)  # they add to it
        num_compared += inputs.adapters is not None
        return found

    adapters = {name: path for name, (path, _) in adapted("qwen3").items()}
    driver = AdaptedDriver(make_driver("qwen3", dtype="bfloat16"), adapters)
    monkeypatch.setattr(WholeDecoder, "forward", compare)
    generate_all(driver, NAMES)
    assert num_compared >= NUM_TOKENS


def test_an_adapter_is_compared_with_the_base_while_a_step_has_adapters(
    make_driver: Callable[..., Driver],
    model_path: Callable[..., Path],
    adapted: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """What PEFT saves of the base is compared on another thread: the step's rows are not its."""
    driver = make_driver("llama", fused=False)
    base, sites = model_path("llama"), driver.runner.adapters
    path = make_adapter(base, tmp_path / "a", targets=("lm_head",))
    weights = load_file(path / "adapter_model.safetensors")
    own = load_file(base / "model.safetensors")["lm_head.weight"]
    weights["base_model.model.lm_head.base_layer.weight"] = own
    save_file(weights, path / "adapter_model.safetensors")
    wide = sites.put(read_adapter(adapted("llama")["wide"][0]))
    of_a_step = LowRankTokens([(wide, torch.tensor([3, 70]))])
    with driver.runner._model._adapters.used(of_a_step, of_a_step):  # type: ignore[attr-defined]
        sites.put(read_adapter(path))


def test_rows_keep_an_adapter_that_is_unloaded(
    make_driver: Callable[..., Driver],
    adapted: Callable[..., Any],
    expected: Callable[..., dict[str, Any]],
) -> None:
    adapters = {name: path for name, (path, _) in adapted("llama").items()}
    driver = AdaptedDriver(make_driver("llama"), adapters)
    driver.add("wide-0", PROMPTS[0])
    driver.step()
    driver.runner.adapters.unload("wide")
    assert driver.generate("wide-0", NUM_TOKENS) == expected("llama")["wide-0"]
    driver.add("wide-1", PROMPTS[1])
    assert "KeyError" in driver.step({"wide-1": 1}).failed["wide-1"]


def test_an_adapter_of_another_model_is_refused_by_name(
    make_driver: Callable[..., Driver], model_path: Callable[..., Path], tmp_path: Path
) -> None:
    base, sites = model_path("llama"), make_driver("llama").runner.adapters
    path = make_adapter(base, tmp_path / "a", targets=("lm_head", "embed_tokens"))
    weights = load_file(path / "adapter_model.safetensors")
    prefix = "base_model.model."

    def refused(tensors: dict[str, Any], why: str) -> None:
        save_file(tensors, path / "adapter_model.safetensors")
        with pytest.raises(ConfigError, match=why) as caught:
            sites.put(read_adapter(path))
        assert str(path) in str(caught.value)

    q_proj = f"{prefix}model.layers.{{}}.self_attn.{{}}.lora_{{}}.weight"
    a, b = torch.ones(4, 64), torch.ones(64, 4)
    refused({q_proj.format(9, "q_proj", "A"): a, q_proj.format(9, "q_proj", "B"): b}, "layers.9")
    refused({q_proj.format(1, "w_pack", "A"): a, q_proj.format(1, "w_pack", "B"): b}, "w_pack")
    refused(
        {q_proj.format(1, "k_proj", "A"): a, q_proj.format(1, "k_proj", "B"): b},
        "has 64 inputs and 64 outputs, in the model it has 64 and 32: it is of another base",
    )
    # PEFT saves what embeddings and heads are in the base, beside their adapters.
    own = load_file(base / "model.safetensors")
    for module in ("model.embed_tokens", "lm_head"):
        key = f"{prefix}{module}.base_layer.weight"
        same = own[f"{module}.weight"]
        save_file(weights | {key: same}, path / "adapter_model.safetensors")
        sites.put(read_adapter(path))
        refused(weights | {key: same.flip(0).contiguous()}, "brings another")
        refused(weights | {key: same[1:].contiguous()}, "the model's is")
