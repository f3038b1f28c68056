"""Every feature of a model in every situation of the scheduler has the tokens of `transformers`.

A cell is one tiny model, its settings, and a proof that the situation came about. What the settings
refuse together is a cell as well.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from aioserve import AsyncEngine, EngineConfig, MultimodalPrompt, SamplingParams
from aioserve.config import (
    AdapterConfig,
    CacheConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from aioserve.errors import ConfigError
from aioserve.runner.spec_decode.draft_length import ModelDraftLength
from tests.adapters import make_adapter, merge
from tests.engine.pausing_policy import PausesAtEveryTurn
from tests.greedy import GreedyReference
from tests.kit import stats_of
from tests.models import VOCAB_SIZE, make_model
from tests.mtp_models import make_mtp_model
from tests.multimodal.test_vision_language import ONE, Seeing

pytest.importorskip("PIL")

# The loop is the subject of other tests; a cell loads a model.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

NUM_TOKENS = 16
BLOCK = 8  # tokens
CHUNK = 16  # tokens of a step where prompts come in pieces


def make_prompts() -> list[list[int]]:
    """Four of 9 to 61 tokens; the last two have 40 in common."""
    rng = random.Random(3)
    shared = [rng.randrange(3, 500) for _ in range(40)]
    prompts = [[rng.randrange(3, 500) for _ in range(n)] for n in (9, 61)]
    return prompts + [shared + [rng.randrange(3, 500) for _ in range(n)] for n in (6, 13)]


@dataclass
class Case:
    """One feature: a model with what it needs, its prompts, and their greedy tokens."""

    path: Path
    prompts: Sequence[Any]
    expected: list[list[int]]
    sections: dict[str, Any] = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)  # of `generate`
    max_model_len: int = 144
    few_blocks: int = 20  # in which one request fits, and not all of them


def _of_text(path: Path, reference: Path | None = None, **more: Any) -> Case:
    import torch

    model = GreedyReference(reference or path, torch.float32)
    prompts = make_prompts()
    expected: list[Any] = [model.tokens(prompt, NUM_TOKENS) for prompt in prompts]
    return Case(path, prompts, expected, **more)


def _states(folder: Path) -> Case:
    """Linear attention beside attention."""
    fields = {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_hidden_layers": 4,
    }
    return _of_text(make_model("qwen3_5_text", folder, **fields), cache={"num_state_slots": 24})


def _windows(folder: Path) -> Case:
    """Layers with sliding windows beside one without."""
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    path = make_model("gemma3_text", folder, sliding_window=24, layer_types=layers)
    return _of_text(path, cache={"num_window_blocks": 40})


def _drafts(folder: Path) -> Case:
    """Guesses of the model itself, which are right but for rounding."""
    path = make_model("llama", folder)
    drafts = SpeculationConfig(
        speculative_method="draft", draft_model=str(path), num_speculative_tokens=3
    )
    return _of_text(path, sections={"speculation": drafts})


def _mtp(folder: Path) -> Case:
    """Drafts of an MTP layer that knows nothing, which are taken back from states."""
    fields = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 1024, "eos_token_id": None}
    path = make_mtp_model("qwen3_5_text", folder, **fields)
    drafts = SpeculationConfig(speculative_method="mtp", num_speculative_tokens=3)
    return _of_text(path, cache={"num_state_slots": 24}, sections={"speculation": drafts})


@pytest.fixture(autouse=True)
def every_draft_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it does depends on how quick the machine is."""

    def stepped(self: ModelDraftLength, num_rows: int, num_tokens: int, seconds: float) -> None:
        self.price = 1e-6

    monkeypatch.setattr(ModelDraftLength, "stepped", stepped)


def _adapters(folder: Path) -> Case:
    path = make_model("llama", folder / "base")
    adapter = make_adapter(path, folder / "wide", rank=5)
    return _of_text(
        path,
        merge(path, adapter, folder / "merged"),
        sections={"adapters": AdapterConfig(lora=(f"wide={adapter}",))},
        fields={"adapter": "wide"},
    )


def _images(folder: Path) -> Case:
    seeing = Seeing(ONE, folder)
    given = seeing.prompts()[:4]
    expected = [seeing.tokens(text, images, NUM_TOKENS) for text, images in given]
    prompts = [MultimodalPrompt(text, images) for text, images in given]
    return Case(folder, prompts, expected, max_model_len=240, few_blocks=32)


FEATURES: dict[str, Callable[[Path], Case]] = {
    "states": _states,
    "windows": _windows,
    "drafts": _drafts,
    "mtp": _mtp,
    "adapters": _adapters,
    "images": _images,
}


@pytest.fixture(scope="module", params=FEATURES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return FEATURES[request.param](tmp_path_factory.mktemp(request.param))


def make_config(case: Case, *, num_kv_blocks: int = 96, **scheduler: Any) -> EngineConfig:
    has_text = not isinstance(case.prompts[0], list)
    return EngineConfig(
        model=ModelConfig(
            model=str(case.path),
            dtype="float32",
            max_model_len=case.max_model_len,
            skip_tokenizer_init=not has_text,
        ),
        cache=CacheConfig(num_kv_blocks=num_kv_blocks, block_size=BLOCK, watermark=0, **case.cache),
        runner=RunnerConfig(threads=1),
        scheduler=SchedulerConfig(
            **{
                "policy": "chunked_prefill",
                "options": {"chunk_size": 256},
                "max_num_seqs": 4,
                **scheduler,
            }
        ),
        **case.sections,
    )


async def ask(engine: AsyncEngine, case: Case, place: int) -> tuple[list[int], int]:
    """The tokens of a prompt, and how many tokens of it were cached."""
    params = SamplingParams(
        max_tokens=NUM_TOKENS,
        temperature=0,
        ignore_eos=True,
        detokenize=engine.config.model.skip_tokenizer_init is False,
    )
    tokens: list[int] = []
    async for output in engine.generate(case.prompts[place], params, **case.fields):
        tokens += output.token_ids
        num_cached = output.num_cached_tokens
    return tokens, num_cached


async def ask_all(engine: AsyncEngine, case: Case) -> None:
    """All prompts at once; their tokens are the reference's."""
    # Images are prepared in threads, so that requests arrive when they are ready: the pause lets
    # them begin in the same step.
    await engine.pause()
    asked = asyncio.gather(*(ask(engine, case, i) for i in range(len(case.prompts))))
    while not asked.done():
        if stats_of(engine).num_waiting_reqs == len(case.prompts):
            break
        await asyncio.sleep(0.001)
    await engine.resume()
    found = await asked
    assert [tokens for tokens, _ in found] == case.expected


async def test_prompts_in_pieces(case: Case) -> None:
    config = make_config(case, options={"chunk_size": CHUNK})
    async with AsyncEngine(config) as engine:
        await ask_all(engine, case)
        stats = stats_of(engine)
        assert stats.num_prefill_tokens > 2 * CHUNK
        # Each step had a chunk at the most.
        assert stats.num_steps >= stats.num_prefill_tokens / CHUNK
        if (speculation := case.sections.get("speculation")) is not None:
            assert stats.num_draft_tokens > 0
            assert stats.num_accepted_tokens or speculation.speculative_method == "mtp"


async def test_a_cached_prefix(case: Case) -> None:
    async with AsyncEngine(make_config(case)) as engine:
        await ask_all(engine, case)
        for place, expected in enumerate(case.expected):
            tokens, num_cached = await ask(engine, case, place)
            assert tokens == expected
            if place:  # the first is one block long, of which the last token is computed again
                assert num_cached >= BLOCK


async def test_preemption(case: Case) -> None:
    config = make_config(case, num_kv_blocks=case.few_blocks)
    async with AsyncEngine(config) as engine:
        await ask_all(engine, case)
        assert stats_of(engine).num_preemptions > 0


@pytest.mark.parametrize("depth", [1, 2])
async def test_pauses(case: Case, depth: int) -> None:
    if depth == 2 and "speculation" in case.sections:
        return
    before = PausesAtEveryTurn.num_pauses
    policy = f"{PausesAtEveryTurn.__module__}:{PausesAtEveryTurn.__name__}"
    config = make_config(case, policy=policy, options={}, pipeline_depth=depth)
    async with AsyncEngine(config) as engine:
        await ask_all(engine, case)
        assert stats_of(engine).num_preemptions == 0
    assert PausesAtEveryTurn.num_pauses > before + 4


async def test_two_steps_in_flight(case: Case) -> None:
    if "speculation" in case.sections:
        with pytest.raises(ConfigError, match="a step begins before what to guess from is known"):
            async with AsyncEngine(make_config(case, pipeline_depth=2)):
                pass
        return
    async with AsyncEngine(make_config(case, pipeline_depth=2)) as engine:

        async def two_are_in_flight() -> None:
            while True:
                now = engine.inspect()
                if now is not None and len(now.steps_in_flight) == 2:
                    return
                await asyncio.sleep(0)

        seen = asyncio.create_task(two_are_in_flight())
        await ask_all(engine, case)
        assert seen.done()
