"""MTP layers with random weights: they draft what a plain reference drafts, and change no token."""

import asyncio
import json
import random
import shutil
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

import aioserve
from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import (
    AdapterConfig,
    CacheConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from aioserve.errors import ConfigError
from aioserve.features.spec_decode.model_drafter import HeadDrafter, ModelDraftLength
from aioserve.runner.interface import RunnerInterface
from tests.adapters import make_adapter
from tests.engine.test_speculation import check_equal, generate
from tests.gguf_models import write_gguf
from tests.kit import greedy, stats_of, tokens_of
from tests.models import make_model
from tests.mtp_models import (
    DEEPSEEK_NAMES,
    QWEN_NAMES,
    LibraryReference,
    MtpReference,
    make_mtp_model,
)
from tests.packed_checkpoints import float8, write_checkpoint
from tests.runner.cuda.fake_device import FakeDevice
from tests.runner.cuda.on_device import make_device_runner
from tests.slow import mostly_slow

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

SEATS = 4
FEW = (100, 103, 106)  # of so few, a layer that knows nothing is often right
WAYS: list[dict[str, Any]] = [
    {"temperature": 0, "allowed_token_ids": list(FEW)},
    {"temperature": 0, "allowed_token_ids": list(FEW), "prompt_logprobs": 1},
    {"temperature": 1.0, "allowed_token_ids": list(FEW)},
    {"temperature": 0.8, "top_p": 0.9},
]


@pytest.fixture(autouse=True)
def every_draft_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pays depends on how busy the machine is."""

    def stepped(self: ModelDraftLength, num_rows: int, num_tokens: int, seconds: float) -> None:
        self.price = 1e-6

    monkeypatch.setattr(ModelDraftLength, "stepped", stepped)


#: "llama" is served fused; Qwen's have states.
KINDS = (*DEEPSEEK_NAMES[:3], "llama", *QWEN_NAMES)


@pytest.fixture(scope="module", params=mostly_slow(KINDS, but=["glm4_moe", "qwen3_5_text"]))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mtp_model(request.param, tmp_path_factory.mktemp(request.param))


def make_config(model: Path, method: Any, **sections: Any) -> EngineConfig:
    speculation = SpeculationConfig(speculative_method="none")
    if method != "none":
        speculation = SpeculationConfig(speculative_method=method, num_speculative_tokens=3)
    parts: dict[str, Any] = {
        "model": ModelConfig(
            model=str(model), dtype="float32", max_model_len=100, skip_tokenizer_init=True
        ),
        "cache": CacheConfig(block_size=4, num_kv_blocks=34),
        "scheduler": SchedulerConfig(
            max_num_batched_tokens=16, max_num_seqs=SEATS, pipeline_depth=1
        ),
        "speculation": speculation,
    }
    return EngineConfig(**parts | sections)


async def say(
    model: Path,
    method: str,
    make_runner: Callable[[EngineConfig], RunnerInterface] | None = None,
    *,
    num_aborted: int = 0,
) -> list[list[int]]:
    """Eight requests, some with the same beginning, in a pool too small for those that run; each
    arrives when another one has said a random number of tokens, where the first `num_aborted` are
    aborted. Then four of them again.
    """
    rng = random.Random(4)
    shared = [rng.randrange(3, 256) for _ in range(17)]
    own = [[rng.randrange(3, 256) for _ in range(rng.choice((1, 9, 21)))] for _ in range(8)]
    prompts = [shared[: rng.choice((0, 9, 17))] + token_ids for token_ids in own]
    enough = [rng.randrange(1, 12) for _ in prompts]  # tokens after which another one comes
    said_enough = [asyncio.Event() for _ in prompts]
    config = make_config(model, method)
    runner = None if make_runner is None else make_runner(config)
    async with AsyncEngine(config, runner=runner) as engine:

        async def one(number: int) -> list[int]:
            way = WAYS[number % len(WAYS)]
            params = SamplingParams(
                **{"max_tokens": 28, "seed": 5, "ignore_eos": True, "detokenize": False} | way
            )
            if number >= SEATS:
                await said_enough[number - SEATS].wait()
            found: list[int] = []
            async with aclosing(engine.generate(prompts[number], params)) as outputs:
                async for output in outputs:
                    found += output.token_ids
                    if len(found) > enough[number]:
                        said_enough[number].set()
                    if number < num_aborted and len(found) > enough[number]:
                        break
            return found

        said = await asyncio.gather(*map(one, range(len(prompts))))
        num_aborted = 0
        said += await asyncio.gather(*map(one, range(len(WAYS))))
        stats = stats_of(engine)
        assert stats.num_preemptions
        assert stats.num_prefix_hit_tokens
        assert (stats.num_accepted_tokens > 20) == (method != "none")
        assert not stats.num_used_kv_blocks
        return said


_PLAIN: dict[Path, list[list[int]]] = {}  # by model


async def say_plainly(model: Path) -> list[list[int]]:
    """What a model says without drafts, computed once."""
    if model not in _PLAIN:
        _PLAIN[model] = await say(model, "none")
    return _PLAIN[model]


Compared = list[tuple[list[int], list[int]]]


def compare(
    reference: MtpReference | LibraryReference, monkeypatch: pytest.MonkeyPatch
) -> Compared:
    """The greedy drafts that are made from now on, each beside what `reference` drafts."""
    guesses = HeadDrafter.guesses
    compared: Compared = []

    def noted(self: HeadDrafter, *arguments: Any) -> dict[int, list[int]]:
        found = guesses(self, *arguments)
        texts = arguments[-1]
        for row, own in found.items():
            (known,) = texts.batch.num_tokens([row])
            one, begin, end = (torch.tensor([n]).numpy() for n in (row, 0, int(known)))
            if texts.sampling.select(one, end).temperature[0] == 0:
                text = texts.batch.pack(one, begin, end).input_ids.tolist()
                expected = reference.draft(text, len(own), FEW)
                compared.append((own[: len(expected)], expected))
        return found

    monkeypatch.setattr(HeadDrafter, "guesses", noted)
    return compared


@pytest.mark.parametrize("side", mostly_slow(["cpu", "cuda"], but=["cpu"]))
@pytest.mark.parametrize("model", mostly_slow(KINDS, but=["glm4_moe"]), indirect=True)
async def test_a_layer_drafts_what_a_plain_reference_drafts(
    model: Path, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces, after preemptions, on cached prefixes, behind drafts that were wrong; and every
    text is what it is without the layer. "cuda": on a device that computes as late as it may.
    """
    compared = compare(MtpReference(model), monkeypatch)
    make_runner = None
    if side == "cuda":
        if "qwen" in model.name:
            pytest.skip("CUDA serves no layers with states")
        make_runner = partial(make_device_runner, device=FakeDevice(1, eagerness=0.3))
    assert await say(model, "mtp", make_runner) == await say_plainly(model)
    assert len(compared) > 60
    assert all(own == expected for own, expected in compared)


@pytest.mark.slow
async def test_a_layer_of_few_bits_drafts_as_its_numbers_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_mtp_model("glm4_moe", tmp_path / "plain")
    config = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    write = float8((16, 16), "weight_scale_inv")
    packed = write_checkpoint(
        plain, tmp_path / "packed", config, write, "model.layers.3.*_proj.weight"
    )
    compared = compare(MtpReference(packed / "unpacked"), monkeypatch)
    assert await say(packed, "mtp") == await say(packed / "unpacked", "none")
    assert len(compared) > 60
    assert all(own == expected for own, expected in compared)


@pytest.mark.slow
async def test_of_several_layers_the_first_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_mtp_model("qwen3_5_text", tmp_path / "several")
    compared = compare(MtpReference(path), monkeypatch)
    weights = load_file(path / "model.safetensors")
    for name, weight in [*weights.items()]:
        if name.startswith("mtp.layers.0."):
            weights[name.replace("layers.0.", "layers.1.")] = weight + 1
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    assert await say(path, "mtp") == await say(path, "none")
    assert len(compared) > 60
    assert all(own == expected for own, expected in compared)


@pytest.mark.slow
async def test_a_layer_with_a_sliding_window_drafts_what_transformers_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mellum's, which turns its heads as its layers with windows do."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    path = make_mtp_model(
        "mellum",
        tmp_path / "mellum",
        num_mtp_layers=1,
        num_hidden_layers=3,
        sliding_window=8,
        layer_types=layers,
        rope_parameters={layers[0]: rope | {"rope_theta": 100.0}, layers[1]: rope},
    )
    compared = compare(LibraryReference(path), monkeypatch)
    assert await say(path, "mtp") == await say(path, "none")
    assert len(compared) > 60
    assert all(own == expected for own, expected in compared)


@pytest.mark.parametrize("kind", mostly_slow(["llama", "qwen3_5_text"], but=["qwen3_5_text"]))
async def test_a_request_with_an_adapter_gets_its_tokens(kind: str, tmp_path: Path) -> None:
    model = make_mtp_model(kind, tmp_path / "model", eos_token_id=None)
    targets = ("model.layers.0.mlp.down_proj", "model.layers.2.mlp.gate_proj")
    own = make_adapter(model, tmp_path / "mine", targets=targets)
    adapters = AdapterConfig(lora=(f"mine={own}",))
    params = msgspec.structs.replace(greedy(30), allowed_token_ids=list(FEW))
    said = []
    for method in ("none", "mtp"):
        async with AsyncEngine(make_config(model, method, adapters=adapters)) as engine:

            async def one(prompt: list[int], engine: AsyncEngine = engine) -> list[list[int]]:
                found: dict[str, list[int]] = {"": [], "mine": []}
                for name, own in found.items():
                    fields = {"adapter": name} if name else {}
                    async for output in engine.generate(prompt, params, **fields):
                        own += output.token_ids
                return [*found.values()]

            said.append(await asyncio.gather(*(one([7, 8, 9 + n]) for n in range(4))))
            stats = stats_of(engine)
    assert said[0] == said[1]
    assert any(plain != adapted for plain, adapted in said[0])
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 10


@pytest.mark.slow
async def test_the_layer_of_a_model_that_sees_drafts_for_its_text(tmp_path: Path) -> None:
    """As Qwen3.5 is published: the text model has other names, the MTP layer the same."""
    text = make_mtp_model("qwen3_5_text", tmp_path / "text")
    seeing = make_seeing(text, tmp_path / "seeing")
    assert await say(seeing, "mtp") == await say(text, "none")


def make_seeing(text: Path, path: Path) -> Path:
    """The model of `text` with an encoder of images."""
    config = AutoConfig.for_model(
        "qwen3_5",
        text_config=json.loads((text / "config.json").read_text()),
        vision_config={
            **{"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2},
            **{"out_hidden_size": 64, "num_position_embeddings": 16},
        },
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(path)
    weights = load_file(path / "model.safetensors")
    for name, weight in load_file(text / "model.safetensors").items():
        weights[name.replace("model.", "model.language_model.")] = weight
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.slow  # tests/matrix has every kind beside MTP, in `make test-all` too
async def test_no_kind_of_request_gets_other_tokens(tmp_path: Path) -> None:
    """Grammars, several samples, log probabilities, stop strings and penalties, beside each other,
    on a model whose layers have states.
    """
    embedded = Path(aioserve.__file__).parent / "model_source" / "embedded"
    eos = json.loads((embedded / "config.json").read_text())["eos_token_id"]
    fields = {"vocab_size": 2048, "max_position_embeddings": 256, "eos_token_id": eos}
    model = make_mtp_model("qwen3_5_text", tmp_path / "model", **fields)
    for file in embedded.glob("token*.json"):
        shutil.copy(file, model)
    mtp = SpeculationConfig(speculative_method="mtp", num_speculative_tokens=3)
    plain, _ = await generate(SpeculationConfig(speculative_method="none"), model=str(model))
    drafted, stats = await generate(mtp, model=str(model))
    check_equal(drafted, plain)
    assert stats.num_draft_tokens > 1000
    assert stats.num_accepted_tokens > 10


@pytest.mark.parametrize("model", mostly_slow(KINDS, but=["qwen3_5_text"]), indirect=True)
async def test_aborted_requests_change_no_token_of_others(model: Path) -> None:
    found = await say(model, "mtp", num_aborted=5)
    for number, (own, expected) in enumerate(zip(found, await say_plainly(model), strict=True)):
        assert own == expected[: len(own)]
        assert (len(own) < len(expected)) == (number < 5)


async def test_the_reference_drafts_what_transformers_drafts(model: Path) -> None:
    """Of the families whose MTP layer the library knows: the first token."""
    reference = MtpReference(model)
    if not hasattr(reference.model.config, "num_mtp_layers"):
        pytest.skip("transformers does not know the MTP layer of this family")
    library = LibraryReference(model, r"model\.layers\.3\.")
    rng = random.Random(7)
    for length in (2, 3, 9, 20):
        text = [rng.randrange(3, 256) for _ in range(length)]
        assert library.draft(text, 1, range(256)) == reference.draft(text, 1, range(256))


def make_obvious(path: Path) -> Path:
    """A model whose next token depends on the newest alone, and an MTP layer that knows it: all
    layers hand on what enters them.
    """
    make_mtp_model("glm4_moe", path)
    weights = load_file(path / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
        elif name.endswith("eh_proj.weight"):
            weight.copy_(torch.eye(*weight.shape))  # the token's half of what it is given
    weights["model.layers.3.enorm.weight"].fill_(1)
    weights["model.layers.3.shared_head.norm.weight"] = weights["model.norm.weight"].clone()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


async def test_drafts_of_a_layer_that_knows_the_model_are_accepted(tmp_path: Path) -> None:
    """Greedy and sampled: three drafts a step, nearly all of them right."""
    said, steps = {}, {}
    for method in ("none", "mtp"):
        async with AsyncEngine(make_config(make_obvious(tmp_path / method), method)) as engine:
            ways = ({"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9})
            params = [msgspec.structs.replace(greedy(60), seed=3, **way) for way in ways]
            said[method] = [await tokens_of(engine, [7, 8, 9], each) for each in params]
            stats = stats_of(engine)
            steps[method] = stats.num_steps
    assert said["mtp"] == said["none"]
    assert stats.num_accepted_tokens > 0.95 * stats.num_draft_tokens > 100
    assert steps["mtp"] < 0.35 * steps["none"]


async def refusal(path: Path, **sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        async with AsyncEngine(make_config(path, "mtp", **sections)):
            pass
    return str(caught.value)


async def test_a_checkpoint_without_a_layer_that_can_draft_is_refused_in_one_line(
    tmp_path: Path,
) -> None:
    plain = make_model("llama", tmp_path / "plain")
    assert (
        "speculative_method is mtp, but "
        f"{plain} has no MTP layer (no model.layers.3.eh_proj.weight or mtp.fc.weight): take ngram"
    ) in await refusal(plain)
    stored = load_file(make_mtp_model("glm4_moe", tmp_path / "whole") / "model.safetensors")

    def damaged(name: str, **changed: torch.Tensor | None) -> Path:
        path = make_mtp_model("glm4_moe", tmp_path / name)
        own = stored | {f"model.layers.3.{key}.weight": value for key, value in changed.items()}
        kept = {key: value for key, value in own.items() if value is not None}
        save_file(kept, path / "model.safetensors", {"format": "pt"})
        return path

    assert "lacks one of its norms" in await refusal(damaged("normless", enorm=None))
    wide = damaged("wide", eh_proj=torch.zeros(64, 64))
    assert "has a eh_proj.weight of [64, 64], not [64, 128]" in await refusal(wide)
    short = damaged("short", hnorm=torch.ones(63))
    assert "has a hnorm.weight of [63], not [64]" in await refusal(short)
    bare = damaged("bare", input_layernorm=None)
    assert "model.layers.0.input_layernorm.weight is missing" in await refusal(bare)
    odd = damaged("odd", oddity=torch.zeros(3))
    assert "model.layers.0.oddity.weight is not known" in await refusal(odd)
    qwen = make_mtp_model("qwen3_5_text", tmp_path / "qwen")
    stored = load_file(qwen / "model.safetensors")
    stored["mtp.embed_tokens.weight"] = torch.zeros(256, 64)
    save_file(stored, qwen / "model.safetensors", {"format": "pt"})
    assert "embed_tokens.weight is not known" in await refusal(qwen)
    indexed = make_mtp_model("deepseek_v32", tmp_path / "indexed")
    assert "does not tell of its hidden states" in await refusal(indexed)
    right = tmp_path / "whole"
    assert "is not read weight by weight" in await refusal(write_gguf(plain, tmp_path / "a.gguf"))
    assert "at scheduler.pipeline_depth 2" in await refusal(
        right, scheduler=SchedulerConfig(pipeline_depth=2)
    )


@pytest.mark.parametrize("kind", mostly_slow(["glm4_moe", "qwen3_5_text"], but=["qwen3_5_text"]))
async def test_the_layer_comes_back_with_the_weights(kind: str, tmp_path: Path) -> None:
    """After `sleep`; and weights without such a layer are refused, and those before serve on."""
    model = make_mtp_model(kind, tmp_path / "model")
    stored = load_file(model / "model.safetensors")
    bare = make_mtp_model(kind, tmp_path / "bare")
    kept = {name: w for name, w in stored.items() if "fc.weight" not in name and "eh_" not in name}
    save_file(kept, bare / "model.safetensors", {"format": "pt"})
    params = msgspec.structs.replace(greedy(30), allowed_token_ids=list(FEW))
    async with AsyncEngine(make_config(model, "mtp")) as engine:
        first = await tokens_of(engine, [5, 6, 7, 8, 9], params)
        await engine.sleep(weights=True)
        await engine.wake()
        assert await tokens_of(engine, [5, 6, 7, 8, 9], params) == first
        with pytest.raises(ConfigError, match="has no MTP layer"):
            await engine.reload(str(bare))
        before = stats_of(engine).num_accepted_tokens
        assert await tokens_of(engine, [5, 6, 7, 8, 9], params) == first
        assert stats_of(engine).num_accepted_tokens > before > 0
