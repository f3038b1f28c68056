"""Models of many kinds say on a card what they say on a CPU; the same on a stand-in for a card.

In bfloat16, with flashinfer, CUDA graphs, two steps in flight and preemption: the paths that real
models take. `pytest -m gpu` asks a real card. Each kind of fault is planted once and found.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import card_models
import pytest
import torch
from card_models import (
    ALL_ARE_SCORED,
    BOUNDS,
    CASES,
    COARSE,
    FEW,
    LLAMA,
    MORE_CASES,
    Ask,
    Case,
    WrongNumbersError,
    check_choices,
    check_logprobs,
    check_stats,
    every_draft_pays,
    examine,
    make_asks,
    make_model,
    make_settings,
    on_cpu,
    score,
    serve,
)
from safetensors.torch import load_file, save_file

from aioserve.config import SpeculationConfig
from aioserve.errors import GrammarLimitError
from aioserve.gpu.cuda import executor, flashinfer_attention
from aioserve.gpu.cuda.attention import SeenAhead
from aioserve.gpu.cuda.executor import DecodeGraphs
from aioserve.gpu.cuda.sampler import DeviceMasks, DeviceSampler
from aioserve.runner.batch.input_batch import InputBatch
from tests.adapters import make_adapter, merge
from tests.eagle_models import make_head
from tests.mtp_models import make_mtp_model
from tests.packed_checkpoints import float8, write_checkpoint
from tests.runner.cuda import fake_flashinfer
from tests.slow import mostly_slow

NAMES = {case.name: case for case in (*CASES, *MORE_CASES)}
QUICK = {CASES[0].name, "penalties, limits, prompts' log probabilities", "n-gram drafts", "images"}


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of CUDA graphs that were replayed."""
    replayed: list[int] = []
    replay = DecodeGraphs.replay

    def noted(self: DecodeGraphs, size: int) -> torch.Tensor:
        replayed.append(size)
        return replay(self, size)

    monkeypatch.setattr(DecodeGraphs, "replay", noted)
    return replayed


def check_log(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing was done in a slower way than it should be."""
    records = [r for r in caplog.records if r.name.startswith("aioserve.gpu")]
    assert not [r.getMessage() for r in records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("name", mostly_slow(NAMES, but=QUICK))
def test_a_model_says_on_a_card_what_the_cpu_finds_likely(
    name: str, card: Any, sizes: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = examine(NAMES[name], card.runner, tmp_path)
    assert found["preemptions"]
    assert len(set(sizes)) > 1
    check_log(caplog)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["draft model", "EAGLE", "MTP"])
def test_drafts_of_a_model_change_no_numbers_on_a_card(
    way: str, card: Any, sizes: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Beside replayed decodes; the draft model is the model itself, which nearly always agrees."""
    fields = LLAMA | {"vocab_size": ALL_ARE_SCORED}
    ways: Any = card_models.GUESSED
    path, settings = tmp_path / "model", {"speculative_method": "draft"}
    if way == "MTP":
        settings = {"speculative_method": "mtp"}
        ways = ({"temperature": 0, "allowed_token_ids": (3, 7, 11)},)
        own = {k: v for k, v in fields.items() if k not in ("model_type", "initializer_range")}
        make_mtp_model("llama", path, **own)
        weights = load_file(path / "model.safetensors")  # as a card keeps them
        weights = {name: weight.bfloat16() for name, weight in weights.items()}
        save_file(weights, path / "model.safetensors", {"format": "pt"})
    else:
        if way == "EAGLE":
            ways = ({"temperature": 0, "allowed_token_ids": FEW},)
            fields = LLAMA | {"vocab_size": 2048, "num_hidden_layers": 5}
        make_model(Case(way, fields), path)
        settings["draft_model"] = str(path)
        if way == "EAGLE":
            head = make_head(tmp_path / "head", target=LLAMA["hidden_size"], dim=64)
            settings["draft_model"] = str(head)
    speculation = SpeculationConfig(num_speculative_tokens=3, **settings)
    config = make_settings(path, Case(way, fields, speculation=speculation))
    asks = make_asks(ways, 12, vocab_size=fields["vocab_size"])
    with every_draft_pays():
        replies, stats = asyncio.run(serve(config, card.runner(config), asks))
    check_stats(config, stats)
    scores = asyncio.run(score(on_cpu(path), None, replies))
    bounds = COARSE if way == "MTP" else BOUNDS  # a model of larger weights
    check_logprobs(replies, scores, bounds)
    check_choices(replies, scores, bounds.worst)
    assert stats.num_accepted_tokens > 0.1 * stats.num_draft_tokens
    if way == "draft model":
        assert stats.num_accepted_tokens > 0.9 * stats.num_draft_tokens
    check_log(caplog)


@pytest.mark.slow
def test_adapters_on_a_card_say_what_their_merged_weights_find_likely(
    card: Any, sizes: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Beside requests without one, whose steps alone use CUDA graphs."""
    path = make_model(Case("", LLAMA), tmp_path / "model")
    adapters = {name: tmp_path / name for name in ("one", "two")}
    merged = {"": path}
    for seed, (name, own) in enumerate(adapters.items()):
        make_adapter(path, own, seed=seed)
        merged[name] = merge(path, own, tmp_path / f"merged {name}")
    config = make_settings(path, lora=[f"{name}={own}" for name, own in adapters.items()])
    names = ("", "one", "two")
    asks = [
        Ask(ask.prompt, ask.params, names[number % 3])
        for number, ask in enumerate(make_asks(({"temperature": 0},), 12))
    ]
    # the last to end has no adapter
    asks.append(Ask([5, 6, 7], make_asks(({"temperature": 0},), 1, num_tokens=60)[0].params))
    replies, stats = asyncio.run(serve(config, card.runner(config), asks))
    check_stats(config, stats)
    for name, own_path in merged.items():
        own = [reply for reply in replies if reply.ask.adapter == name]
        scores = asyncio.run(score(on_cpu(own_path), None, own))
        check_logprobs(own, scores)
        check_choices(own, scores, BOUNDS.worst)
    assert sizes
    check_log(caplog)


@pytest.mark.slow
def test_a_checkpoint_in_fp8_is_on_a_card_what_its_numbers_are(
    card: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A card has no kernels for few-bit weights: it unpacks them as they are loaded."""
    plain = make_model(Case("", LLAMA), tmp_path / "plain")
    described = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    write = float8((16, 16), "weight_scale_inv")
    packed = write_checkpoint(plain, tmp_path / "packed", described, write)
    config = make_settings(packed)
    asks = make_asks(({"temperature": 0}, {"temperature": 0.8}), 12)
    replies, stats = asyncio.run(serve(config, card.runner(config), asks))
    check_stats(config, stats)
    scores = asyncio.run(score(on_cpu(packed / "unpacked"), None, replies))
    check_logprobs(replies, scores, COARSE)  # scaled as they are unpacked, and rounded
    check_log(caplog)


def overlapped(
    card: Any, folder: Path, count: int, num_tokens: int
) -> tuple[list[Any], list[list[Any]]]:
    """What is said two steps deep with CUDA graphs, and its scores by one eager step at a time."""
    path = make_model(Case("", LLAMA | {"head_dim": 64}), folder / "model")
    asks = make_asks(({"temperature": 0}, {"temperature": 0.8}), count, num_tokens=num_tokens)
    config = make_settings(path, num_kv_blocks=60, max_num_seqs=32)
    replies, stats = asyncio.run(serve(config, card.runner(config), asks))
    check_stats(config, stats)
    config = make_settings(path, pipeline_depth=1, num_kv_blocks=600, enforce_eager=True)
    return replies, asyncio.run(score(config, card.runner(config), replies))


@pytest.mark.parametrize("count", mostly_slow([20, 100], but=[20]))
def test_two_steps_in_flight_with_graphs_say_what_one_eager_step_at_a_time_finds_likely(
    count: int, card: Any, sizes: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replies, scores = overlapped(card, tmp_path, count, 24)
    assert len(sizes) > count / 2
    check_logprobs(replies, scores)
    check_choices(replies, scores, BOUNDS.worst)
    check_log(caplog)


def test_a_plan_that_is_overwritten_before_its_copy_is_found_by_log_probabilities(
    stand_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that, as a card, does not notice: copies come late, and nothing raises."""
    from tests.runner.cuda.card_stand_ins import RacingPlan

    for owner, name in (
        (flashinfer_attention.FlashInferAttention, "begin"),
        (fake_flashinfer._Wrapper, "_plan"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # what is planted goes again
    replies, scores = overlapped(RacingPlan(), tmp_path, 20, 24)
    with pytest.raises(WrongNumbersError, match="log probabilities are off by"):
        check_logprobs(replies, scores)


# Faults, each of which one of the checks finds.


def plant_no_penalties(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceSampler, "_edit", lambda self, logits, plan, slots: logits)


def plant_no_windows(patch: pytest.MonkeyPatch) -> None:
    settings = flashinfer_attention._settings
    patch.setattr(
        flashinfer_attention, "_settings", lambda *args: settings(*args) | {"window_left": -1}
    )


def plant_no_soft_caps(patch: pytest.MonkeyPatch) -> None:
    settings = flashinfer_attention._settings
    patch.setattr(
        flashinfer_attention, "_settings", lambda *args: settings(*args) | {"logits_soft_cap": 0.0}
    )


def plant_no_masks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceMasks, "apply", lambda self, logits: logits)


def plant_no_verification(patch: pytest.MonkeyPatch) -> None:
    """Every draft counts as right."""
    append = InputBatch.append

    def believed(self: InputBatch, inputs: Any, token_ids: Any) -> list[list[int]]:
        wrong = token_ids.copy()
        places = inputs.sampling
        for row, drafts in inputs.drafts.items():
            (own,) = (inputs.rows[places] == row).nonzero()
            wrong[own[:-1]] = drafts[: len(own) - 1]
        return append(self, inputs, wrong)

    patch.setattr(InputBatch, "append", believed)


def plant_no_images(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(executor, "stage_images", lambda plan, sampler: (None, None))


def plant_no_turns(patch: pytest.MonkeyPatch) -> None:
    """Text behind an image turns by its place."""
    plan = executor.plan_step
    patch.setattr(
        executor, "plan_step", lambda inputs, *rest: plan(replace(inputs, turns=None), *rest)
    )


def plant_no_tokens_ahead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SeenAhead, "in_layer", lambda self, window: False)


def plant_no_sampling_limits(patch: pytest.MonkeyPatch) -> None:
    prepare = DeviceSampler.prepare

    def careless(self: DeviceSampler, *args: Any) -> Any:
        return replace(prepare(self, *args), has_top_k=False, has_top_p=False)

    patch.setattr(DeviceSampler, "prepare", careless)


TOGETHER = "images whose tokens see each other, also in windows"
EDITS = "penalties, limits, prompts' log probabilities"
FAULTS: list[tuple[str, Callable[[pytest.MonkeyPatch], None], str]] = [
    (CASES[0].name, plant_no_windows, "log probabilities are off by"),
    (CASES[0].name, plant_no_soft_caps, "log probabilities are off by"),
    (EDITS, plant_no_penalties, "less likely than|is forbidden"),
    (EDITS, plant_no_sampling_limits, "and top_[kp] is"),
    ("grammars", plant_no_masks, "does not match|doesn't satisfy the grammar"),
    ("images", plant_no_images, "log probabilities are off by"),
    ("images", plant_no_turns, "log probabilities are off by"),
    (TOGETHER, plant_no_tokens_ahead, "log probabilities are off by"),
    ("n-gram drafts", plant_no_verification, "log probabilities are off|less likely than"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plant", "told"), FAULTS, ids=[plant.__name__ for _, plant, _ in FAULTS]
)
def test_a_planted_fault_is_found(
    name: str,
    plant: Callable[[pytest.MonkeyPatch], None],
    told: str,
    stand_in: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    with pytest.raises((WrongNumbersError, GrammarLimitError), match=told):
        examine(NAMES[name], stand_in().runner, tmp_path)
