"""A draft model changes when tokens come, never which; and it keeps up, whatever blocks do."""

import asyncio
import itertools
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import aioserve
from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import ModelConfig, SchedulerConfig, SpeculationConfig
from aioserve.errors import ConfigError
from aioserve.features.spec_decode import cpu_passes
from aioserve.features.spec_decode.cpu_passes import CpuDraftRunner
from aioserve.features.spec_decode.model_drafter import DraftModel, ModelDraftLength
from aioserve.outputs import RequestOutput
from aioserve.runner.attention.backend import IntArray, StepInputs
from aioserve.runner.batch.input_batch import InputBatch
from aioserve.runner.cpu import load
from aioserve.runner.cpu.attention import create_attention_backend
from aioserve.runner.cpu.kv_memory import AttentionBackend
from aioserve.runner.cpu.sampler import SampledTokens, sample
from tests.engine.test_speculation import NONE, check_equal, generate
from tests.kit import stats_of
from tests.models import make_model
from tests.slow import mostly_slow
from tests.tokenizing import share_tokenizer

# The loop is the subject of other tests; these load two models each.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

EMBEDDED = Path(aioserve.__file__).parent / "model_source" / "embedded"
ITSELF = SpeculationConfig(speculative_method="draft", draft_model="embedded")


@pytest.fixture(autouse=True)
def every_draft_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pays depends on how busy the machine is."""

    def stepped(self: ModelDraftLength, num_rows: int, num_tokens: int, seconds: float) -> None:
        self.price = 1e-6

    monkeypatch.setattr(ModelDraftLength, "stepped", stepped)


def make_stranger(path: Path, **overrides: Any) -> Path:
    """A small random model with the embedded one's tokenizer."""
    make_model("llama", path, **{"vocab_size": 2048, "num_hidden_layers": 1} | overrides)
    for file in EMBEDDED.glob("token*.json"):
        shutil.copy(file, path)
    share_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> SpeculationConfig:
    path = make_stranger(tmp_path_factory.mktemp("models") / "stranger")
    return SpeculationConfig(
        speculative_method="draft", draft_model=str(path), num_speculative_tokens=3
    )


@pytest.fixture(scope="module")
def plain() -> list[list[RequestOutput]]:
    return asyncio.run(generate(NONE))[0]


@pytest.mark.parametrize(
    "policy", mostly_slow(["chunked_prefill", "mlfq"], but=["chunked_prefill"])
)
async def test_a_good_draft_model_changes_no_token(
    policy: str, plain: list[list[RequestOutput]]
) -> None:
    """Where both models are the same, all but near ties are right: what one has read, the other has
    too, after preemptions, from cached prefixes, and where a grammar forbids.
    """
    guessed, stats = await generate(ITSELF, policy=policy, max_num_batched_tokens=48)
    check_equal(guessed, plain)
    assert stats.num_preemptions
    assert stats.num_draft_tokens > 300
    assert stats.num_accepted_tokens >= 0.99 * stats.num_draft_tokens


async def test_a_draft_model_has_read_what_it_says(
    monkeypatch: pytest.MonkeyPatch, plain: list[list[RequestOutput]]
) -> None:
    """Its K and V are those of the served model, its equal, after guesses that were wrong, and of
    texts that it was not asked about for a while.
    """
    random = np.random.default_rng(0)
    served: list[AttentionBackend] = []
    num_compared = 0
    guesses = DraftModel.guesses

    def limits(self: ModelDraftLength, rows: Iterable[int]) -> dict[int, int]:
        if random.random() < 0.5:
            return {}
        return {row: int(random.integers(1, 9)) for row in rows if random.random() < 0.5}

    def sample_badly(*arguments: Any) -> SampledTokens:
        sampled = sample(*arguments)
        if random.random() < 0.2:
            sampled.token_ids[0] = 300
        return sampled

    def checked(
        self: DraftModel, rows: Sequence[int], others: Sequence[int], *rest: Any
    ) -> dict[int, list[int]]:
        nonlocal num_compared
        found = guesses(self, rows, others, *rest)
        texts = rest[-1]
        assert isinstance(self._runner, CpuDraftRunner)
        for row in (*rows, *others):
            size = min(int(self._num_read[row]), int(texts.batch.num_tokens([row])[0]) - 1)
            blocks = torch.from_numpy(texts.batch.blocks(row)).long()
            ours, theirs = (
                caches.value_caches[-1][blocks].transpose(1, 2).flatten(0, 1)[:size]
                for caches in (self._runner.backend, served[0])
            )
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
            num_compared += size
        return found

    def create(*arguments: Any, **more: Any) -> AttentionBackend:
        served.append(create_attention_backend(*arguments, **more))
        return served[-1]

    monkeypatch.setattr(load, "create_attention_backend", create)
    monkeypatch.setattr(cpu_passes, "sample", sample_badly)
    monkeypatch.setattr(ModelDraftLength, "limits", limits)
    monkeypatch.setattr(DraftModel, "guesses", checked)
    guessed, stats = await generate(ITSELF)
    check_equal(guessed, plain)
    assert stats.num_preemptions
    assert 100 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert num_compared > 3_000


async def test_a_bad_draft_model_changes_no_token(
    stranger: SpeculationConfig, plain: list[list[RequestOutput]]
) -> None:
    guessed, stats = await generate(stranger)
    check_equal(guessed, plain)
    assert stats.num_accepted_tokens < 0.5 * stats.num_draft_tokens


CHOICES, NUM_REQUESTS = (207, 231, 247), 500
PROMPT = [40, 41, 42, 43]


def chances() -> Iterator[tuple[tuple[int, ...], float]]:
    """Of every text of three of the CHOICES behind the PROMPT, by `transformers`."""
    module = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()
    texts = list(itertools.product(CHOICES, repeat=3))
    with torch.inference_mode():
        logits = module(torch.tensor([[*PROMPT, *text] for text in texts])).logits
    steps = (logits[:, len(PROMPT) - 1 : -1, list(CHOICES)] / 2.0).softmax(dim=-1)
    for text, of_text in zip(texts, steps, strict=True):
        places = [CHOICES.index(token_id) for token_id in text]
        yield text, float(np.prod([of_text[at, place] for at, place in enumerate(places)]))


async def chi_square(speculation: SpeculationConfig) -> float:
    """How far the tokens of a number of requests lie from those chances."""
    config = EngineConfig(
        model=ModelConfig(max_model_len=64, dtype="float32"), speculation=speculation
    )
    async with AsyncEngine(config) as engine:

        async def one(seed: int) -> tuple[int, ...]:
            params = SamplingParams(
                temperature=2.0, max_tokens=3, seed=seed, allowed_token_ids=list(CHOICES)
            )
            found: list[int] = []
            async for output in engine.generate(PROMPT, params):
                found += output.token_ids
            return tuple(found)

        counts = Counter(await asyncio.gather(*map(one, range(NUM_REQUESTS))))
    expected = {text: chance * NUM_REQUESTS for text, chance in chances()}
    assert min(expected.values()) > 5  # what the test is good for
    assert len(expected) == 27
    return sum((counts[text] - count) ** 2 / count for text, count in expected.items())


LIMIT = 54.05  # of chi square with 26 degrees of freedom: exceeded by chance once in a thousand


async def test_sampled_texts_are_as_frequent_as_the_model_says(stranger: SpeculationConfig) -> None:
    assert await chi_square(stranger) < LIMIT


async def test_guesses_taken_unseen_would_be_noticed(
    stranger: SpeculationConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test before this one, with a planted fault."""
    append = InputBatch.append

    def take_all(self: InputBatch, inputs: StepInputs, token_ids: IntArray) -> list[list[int]]:
        for index, row in enumerate(inputs.rows.tolist()):
            if drafts := inputs.drafts.get(row):
                token_ids[np.flatnonzero(inputs.sampling == index)[:-1]] = drafts
        return append(self, inputs, token_ids)

    monkeypatch.setattr(InputBatch, "append", take_all)
    assert await chi_square(stranger) > 2 * LIMIT


def pad(path: Path, size: int, scale: float) -> Path:
    """The embedded model with a vocabulary of `size`: what is new is what is old, times `scale`."""
    shutil.copytree(EMBEDDED, path)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": size}), encoding="utf-8")
    weights = load_file(path / "model.safetensors")
    for name, weight in weights.items():
        if len(weight) == 2048:
            more = scale * weight[300 : 300 + size - len(weight)]
            weights[name] = torch.cat((weight, more)).contiguous()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    share_tokenizer(path)
    return path


async def test_a_draft_model_that_is_padded_proposes_no_padding(
    tmp_path: Path, plain: list[list[RequestOutput]]
) -> None:
    """Though by its weights that would often come first."""
    draft = pad(tmp_path / "padded", 2112, 3.0)
    padded = SpeculationConfig(speculative_method="draft", draft_model=str(draft))
    guessed, stats = await generate(padded)
    check_equal(guessed, plain)
    assert stats.num_accepted_tokens >= 0.99 * stats.num_draft_tokens


@pytest.mark.slow
async def test_a_draft_model_may_know_less_than_a_padded_model(tmp_path: Path) -> None:
    """What it does not know it neither guesses nor is asked to read: torch would notice."""
    target = str(pad(tmp_path / "padded", 2112, 1.0))

    async def say(speculation: SpeculationConfig) -> list[list[int]]:
        config = EngineConfig(
            model=ModelConfig(model=target, max_model_len=128, dtype="float32", fused=False),
            speculation=speculation,
        )
        async with AsyncEngine(config) as engine:

            async def one(prompt: list[int], temperature: float) -> list[int]:
                bias = {2100: 6.0} if temperature else None
                params = SamplingParams(
                    temperature=temperature, seed=1, max_tokens=40, logit_bias=bias
                )
                found: list[int] = []
                async for output in engine.generate(prompt, params):
                    found += output.token_ids
                return found

            prompts = ([40, 41, 42], [2111, 40, 2050, 41])
            said = await asyncio.gather(*(one(p, t) for p in prompts for t in (0.0, 1.0)))
            stats = stats_of(engine)
            assert (stats.num_accepted_tokens > 5) == (speculation is ITSELF)
            return said

    guessed = await say(ITSELF)
    assert guessed == await say(NONE)
    assert any(token_id >= 2048 for own in guessed for token_id in own)  # it was read again


async def refusal(draft: Path | str | None, **settings: Any) -> str:
    speculation = SpeculationConfig(
        speculative_method="draft", draft_model=None if draft is None else str(draft)
    )
    with pytest.raises(ConfigError) as caught:
        async with AsyncEngine(EngineConfig(speculation=speculation, **settings)):
            pass
    return str(caught.value)


async def test_a_draft_model_that_cannot_work_is_refused_in_one_line(tmp_path: Path) -> None:
    short = make_model("llama", tmp_path / "short")
    assert "another vocabulary than embedded: 512 tokens, not 2,048" in await refusal(short)
    other = make_stranger(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["ing"], vocabulary["th"] = there, here = vocabulary["th"], vocabulary["ing"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    assert f"embedded: 'ing' is {there} in it, and {here} here" in await refusal(other)
    twisted = make_stranger(tmp_path / "twisted", vocab_size=2112)
    tokenizer = json.loads((EMBEDDED / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["merges"].reverse()
    (twisted / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    assert "its tokenizer joins other pieces" in await refusal(twisted)
    small = make_stranger(tmp_path / "small", vocab_size=2000)
    assert "2,000 tokens, not 2,048" in await refusal(small)
    assert "nowhere" in await refusal("./nowhere")
    assert "there is no speculation.draft_model" in await refusal(None)
    ahead = await refusal("embedded", scheduler=SchedulerConfig(pipeline_depth=2))
    assert "a step begins before what to guess from is known" in ahead
