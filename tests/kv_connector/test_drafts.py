"""Drafting models beside a KV connector: what they know of a block goes where the block goes."""

import asyncio
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import (
    CacheConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from aioserve.features.spec_decode.model_drafter import ModelDraftLength
from tests.kit import greedy, stats_of, tokens_of
from tests.kv_connector.serving import connector_stats
from tests.models import make_model
from tests.mtp_models import make_mtp_model
from tests.slow import mostly_slow

pytestmark = [
    pytest.mark.asyncio(loop_factories=["uvloop"]),
    pytest.mark.usefixtures("at_any_price"),
]

FEW = (100, 103, 106)  # of so few, a layer that knows nothing is often right
PROMPTS = [[3 + i] * 30 + [(7 * i + j * j) % 90 + 3 for j in range(4 + 5 * i)] for i in range(5)]
NUM_TOKENS = 16


@pytest.fixture(autouse=True)
def num_read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The tokens that drafting models have read; every draft pays, however busy the machine is."""
    counts: Counter[str] = Counter()
    drafted = ModelDraftLength.drafted

    def count(self: ModelDraftLength, num_tokens: int, seconds: float) -> None:
        counts["tokens"] += num_tokens
        drafted(self, num_tokens, seconds)

    def stepped(self: ModelDraftLength, num_rows: int, num_tokens: int, seconds: float) -> None:
        self.price = 1e-6

    monkeypatch.setattr(ModelDraftLength, "drafted", count)
    monkeypatch.setattr(ModelDraftLength, "stepped", stepped)
    return counts


#: A model that drafts for itself is always right, if it has read what it says that it has.
KINDS = ("itself", "glm4_moe", "qwen3_5_text")
of_every_kind = pytest.mark.parametrize(
    "served", mostly_slow(KINDS, but=["itself", "qwen3_5_text"]), indirect=True
)


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, SpeculationConfig]:
    """A model, and what makes drafts for it."""
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "itself":
        model = make_model("llama", path)
        method: dict[str, Any] = {"speculative_method": "draft", "draft_model": str(model)}
    else:
        model, method = make_mtp_model(request.param, path), {"speculative_method": "mtp"}
    return model, SpeculationConfig(**method, num_speculative_tokens=3)


def settings(
    served: tuple[Path, SpeculationConfig], *, num_kv_blocks: int = 200, **cache: Any
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(
            model=str(served[0]), dtype="float32", max_model_len=96, skip_tokenizer_init=True
        ),
        cache=CacheConfig(
            block_size=4, num_kv_blocks=num_kv_blocks, kv_connector_gib=1 / 64, **cache
        ),
        scheduler=SchedulerConfig(policy="fcfs", max_num_seqs=4, pipeline_depth=1),
        speculation=served[1],
        runner=RunnerConfig(threads=1),
    )


def params() -> SamplingParams:
    return msgspec.structs.replace(greedy(NUM_TOKENS), allowed_token_ids=list(FEW))


async def run_all(engine: AsyncEngine) -> list[list[int]]:
    return await asyncio.gather(*(tokens_of(engine, prompt, params()) for prompt in PROMPTS))


@pytest.fixture(scope="module")
def expected(served: tuple[Path, SpeculationConfig]) -> list[list[int]]:
    """Without drafts and without a connector."""
    config = settings(served, kv_connector="memory")
    cache = CacheConfig(block_size=4, num_kv_blocks=200)
    plain = msgspec.structs.replace(
        config, speculation=SpeculationConfig(speculative_method="none"), cache=cache
    )

    async def run() -> list[list[int]]:
        async with AsyncEngine(plain) as engine:
            return await run_all(engine)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("served", "kind"),
    mostly_slow(
        product(KINDS, ["memory", "disk"]), but=[("itself", "memory"), ("qwen3_5_text", "disk")]
    ),
    indirect=["served"],
)
async def test_drafts_come_about_behind_loaded_blocks_and_change_no_token(
    served: tuple[Path, SpeculationConfig], expected: list[list[int]], kind: str, tmp_path: Path
) -> None:
    """In a pool for one long request, so that blocks come again from outside."""
    path = {"kv_connector_path": str(tmp_path)} if kind == "disk" else {}
    async with AsyncEngine(
        settings(served, num_kv_blocks=26, watermark=0.0, kv_connector=kind, **path)
    ) as engine:
        for turn in range(3):
            num_drafts, num_hits = (
                stats_of(engine).num_draft_tokens,
                connector_stats(engine).num_hit_tokens,
            )
            assert await run_all(engine) == expected
            assert stats_of(engine).num_draft_tokens > num_drafts
            assert not turn or connector_stats(engine).num_hit_tokens > num_hits
        stats = stats_of(engine)
        if served[1].speculative_method == "draft":
            assert stats.num_accepted_tokens == stats.num_draft_tokens


@of_every_kind
async def test_a_drafting_model_does_not_read_again_what_is_loaded(
    served: tuple[Path, SpeculationConfig],
    expected: list[list[int]],
    num_read: Counter[str],
    tmp_path: Path,
) -> None:
    config = settings(served, kv_connector="disk", kv_connector_path=str(tmp_path))
    read: list[int] = []
    for _ in range(2):
        async with AsyncEngine(config) as engine:
            num_read.clear()
            assert await run_all(engine) == expected
            await tokens_of(engine, [5], greedy(2))  # whose steps save what the others have left
            stats, num_hits = stats_of(engine), connector_stats(engine).num_hit_tokens
            assert stats.num_draft_tokens > 0
            if served[1].speculative_method == "draft":
                assert stats.num_accepted_tokens == stats.num_draft_tokens
            read.append(num_read["tokens"])
    assert num_hits > 100
    # A layer that reads two tokens at a time has read a part of the last block of each.
    assert read[1] <= read[0] - num_hits + 4 * len(PROMPTS)


async def test_an_engine_with_another_drafting_model_has_another_folder(tmp_path: Path) -> None:
    """What another model has read of a block is of no use, and what none has is not there."""
    model = make_model("llama", tmp_path / "model")
    other = make_model("llama", tmp_path / "other", num_hidden_layers=1)
    drafts = [
        SpeculationConfig(speculative_method="draft", draft_model=str(path))
        for path in (model, other)
    ]
    for number, speculation in enumerate(
        (SpeculationConfig(speculative_method="none"), *drafts), 1
    ):
        folder = tmp_path / "kv"
        served = model, speculation
        config = settings(served, kv_connector="disk", kv_connector_path=str(folder))
        async with AsyncEngine(config):
            assert len(list(folder.iterdir())) == number


@pytest.mark.dist
@of_every_kind
async def test_drafts_of_the_first_of_two_ranks_are_kept_beside_both_parts(
    served: tuple[Path, SpeculationConfig], expected: list[list[int]], tmp_path: Path
) -> None:
    config = settings(served, kv_connector="disk", kv_connector_path=str(tmp_path))
    config = msgspec.structs.replace(config, runner=RunnerConfig(threads=2, tensor_parallel_size=2))
    for turn in range(2):
        async with AsyncEngine(config) as engine:
            assert await run_all(engine) == expected
            await tokens_of(engine, [5], greedy(2))
            assert stats_of(engine).num_draft_tokens > 0
            assert not turn or connector_stats(engine).num_hit_tokens > 100
            if served[1].speculative_method == "draft":
                assert stats_of(engine).num_accepted_tokens == stats_of(engine).num_draft_tokens
