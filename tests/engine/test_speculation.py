"""Speculation changes when tokens come, never which: the same draws, whatever was guessed."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import CacheConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from aioserve.errors import ConfigError
from aioserve.features.spec_decode.draft_length import (
    DraftLength,
    TextDraftLength,
)
from aioserve.features.spec_decode.model_drafter import ModelDraftLength
from aioserve.kernels import usable_variants
from aioserve.outputs import RequestOutput, SchedulerStats
from aioserve.params import StructuredOutputs
from aioserve.runner import devices
from aioserve.runner.cpu.products import BlockLinear
from aioserve.runner.interface import RunnerInterface
from tests.kit import stats_of
from tests.slow import mostly_slow

# The loop is the subject of other tests; these load a model each.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

# Each way twice: the second time, the first one's words are there to be guessed from.
WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.8, "min_p": 0.05, "logprobs": 2},
    {"temperature": 0.7, "stop": [" the"], "max_tokens": 200},
    {"temperature": 0.7, "logit_bias": {5: 2.0}, "min_tokens": 20},
    {"temperature": 0, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    {"temperature": 1.0, "bad_words": [" my lord"]},
    {"temperature": 1.0, "structured_outputs": StructuredOutputs(regex="([a-z]{2,5} ){9}")},
    {"temperature": 0.9, "n": 2},
]


@pytest.fixture(autouse=True)
def every_draft_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pays depends on how busy the machine is."""

    def stepped(self: DraftLength, num_rows: int, num_tokens: int, seconds: float) -> None:
        self.price = 1e-6

    monkeypatch.setattr(DraftLength, "stepped", stepped)
    monkeypatch.setattr(ModelDraftLength, "stepped", stepped)


async def generate(
    speculation: SpeculationConfig,
    make_runner: Callable[[EngineConfig], RunnerInterface] | None = None,
    model: str = "embedded",
    **scheduler: Any,
) -> tuple[list[list[RequestOutput]], SchedulerStats]:
    """What comes of the `WAYS`, one list of samples each."""
    config = EngineConfig(
        model=ModelConfig(model=model, max_model_len=256, dtype="float32"),
        cache=CacheConfig(block_size=4, num_kv_blocks=66),
        scheduler=SchedulerConfig(max_num_seqs=12, **scheduler),
        speculation=speculation,
    )
    runner = None if make_runner is None else make_runner(config)
    async with AsyncEngine(config, runner=runner) as engine:

        async def one(way: dict[str, Any]) -> list[RequestOutput]:
            params = SamplingParams(**{"max_tokens": 50, "seed": 3} | way)
            samples: dict[int, RequestOutput] = {}
            async for output in engine.generate("KING: My lord, my lord, my lord", params):
                if output.index in samples:
                    samples[output.index].merge(output)
                else:
                    samples[output.index] = output
            return [samples[index] for index in sorted(samples)]

        found = []
        for _ in range(2):
            found += await asyncio.gather(*map(one, WAYS))
        stats = stats_of(engine)
        return found, stats


def said(outputs: list[list[RequestOutput]]) -> list[Any]:
    return [
        (sample.token_ids, sample.text, sample.finish_reason, sample.stop_reason)
        for samples in outputs
        for sample in samples
    ]


def check_equal(guessed: list[list[RequestOutput]], plain: list[list[RequestOutput]]) -> None:
    """The same tokens, and log probabilities as near as float32 brings them."""
    assert said(guessed) == said(plain)
    for ours, theirs in zip(guessed, plain, strict=True):
        for sample, other in zip(ours, theirs, strict=True):
            if other.logprobs is not None:
                assert sample.logprobs is not None
                assert [entry.logprob for entry in sample.logprobs] == pytest.approx(
                    [entry.logprob for entry in other.logprobs], abs=1e-4
                )


NONE, NGRAM = (SpeculationConfig(speculative_method=method) for method in ("none", "ngram"))


@pytest.mark.parametrize(
    "policy", mostly_slow(["chunked_prefill", "fcfs", "mlfq"], but=["chunked_prefill"])
)
async def test_ngrams_change_no_token_of_any_kind_of_request(policy: str) -> None:
    plain, without = await generate(NONE, policy=policy)
    guessed, stats = await generate(NGRAM, policy=policy)
    check_equal(guessed, plain)
    assert 200 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_preemptions
    assert without.num_preemptions


async def test_automatic_drafts_are_ngrams_and_none_where_steps_are_planned_ahead() -> None:
    said, drafts = [], []
    for depth in (1, 2):
        config = EngineConfig(
            model=ModelConfig(dtype="float32"),
            scheduler=SchedulerConfig(pipeline_depth=depth),
            speculation=SpeculationConfig(speculative_method="auto"),
        )
        async with AsyncEngine(config) as engine:
            params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
            token_ids: list[int] = []
            for _ in range(2):
                async for output in engine.generate("KING: My lord, my lord, my lord", params):
                    token_ids += output.token_ids
            stats = stats_of(engine)
            said.append(token_ids)
            drafts.append(stats.num_draft_tokens)
    assert said[0] == said[1]
    assert drafts[0] > 0 == drafts[1]


async def replies(num_streams: int, quantization: Any, **speculation: Any) -> tuple[Any, int]:
    """Tokens and log probabilities, to the bit, and how many tokens of drafts were right."""
    config = EngineConfig(
        model=ModelConfig(model="embedded", dtype="bfloat16", quantization=quantization),
        speculation=SpeculationConfig(**speculation),
    )
    prompts = [f"KING: My lord, my lord, {name}" for name in ("the", "a", "my", "so")]
    async with AsyncEngine(config) as engine:

        async def one(prompt: str, temperature: float) -> list[Any]:
            params = SamplingParams(
                max_tokens=100, temperature=temperature, seed=1, logprobs=2, ignore_eos=True
            )
            outputs = [output async for output in engine.generate(prompt, params)]
            return [entry for output in outputs for entry in output.logprobs or ()]

        found = []
        for temperature in (0.0, 0.5):
            for begin in range(0, len(prompts), num_streams):
                batch = prompts[begin : begin + num_streams]
                found += await asyncio.gather(*(one(prompt, temperature) for prompt in batch))
        return found, stats_of(engine).num_accepted_tokens


@pytest.mark.skipif(not usable_variants(), reason="the kernels were not built")
@pytest.mark.parametrize(
    ("quantization", "num_streams"), [(None, 1), (None, 4), ("int8", 1), ("int4", 1)]
)
async def test_drafts_are_made_unless_told_otherwise_and_change_no_bit(
    quantization: str | None, num_streams: int
) -> None:
    plain, _ = await replies(num_streams, quantization, speculative_method="none")
    guessed, num_right = await replies(num_streams, quantization, num_speculative_tokens=15)
    assert num_right > 40
    assert guessed == plain


@pytest.mark.skipif(not usable_variants(), reason="the kernels were not built")
async def test_automatic_drafts_leave_a_step_as_small_as_its_tokens_have_the_bits_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BlockLinear, "alone_below", 5)
    sizes, verified = set[int](), TextDraftLength.verified

    def noting(self: TextDraftLength, request: Any, num_drafts: int, num_right: int) -> None:
        sizes.add(num_drafts)
        verified(self, request, num_drafts, num_right)

    monkeypatch.setattr(TextDraftLength, "verified", noting)
    await replies(1, "int8")
    assert max(sizes) == 3
    await replies(1, "int8", speculative_method="ngram")
    assert max(sizes) > 3


async def test_a_fault_in_the_price_of_drafts_ends_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: DraftLength, num_rows: int, num_tokens: int, seconds: float) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(DraftLength, "stepped", broken)
    plain, _ = await replies(4, None, speculative_method="none")
    found, _ = await replies(4, None, speculative_method="ngram")
    assert found == plain
    assert "what drafts cost could not be learned" in caplog.text


async def test_automatic_drafts_are_none_for_a_model_whose_products_are_a_librarys() -> None:
    config = EngineConfig(
        model=ModelConfig(model="embedded", fused=False), speculation=SpeculationConfig()
    )
    async with AsyncEngine(config) as engine:
        params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
        async for _ in engine.generate("KING: My lord, my lord, my lord", params):
            pass
        assert not stats_of(engine).num_draft_tokens


async def test_speculation_with_steps_in_flight_is_refused() -> None:
    config = EngineConfig(
        scheduler=SchedulerConfig(pipeline_depth=2),
        speculation=SpeculationConfig(speculative_method="ngram"),
    )
    with pytest.raises(ConfigError, match="pipeline_depth 2 a step begins before"):
        async with AsyncEngine(config):
            pass


@pytest.mark.parametrize("method", ["ngram", "draft"])
async def test_speculation_on_a_cuda_device_with_steps_in_flight_is_refused(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is what it has if nobody says otherwise."""
    monkeypatch.setattr(devices, "choose_device", lambda config: "cuda")
    config = EngineConfig(
        speculation=SpeculationConfig(
            speculative_method=method,  # type: ignore[arg-type]
            draft_model="embedded" if method == "draft" else None,
        ),
    )
    with pytest.raises(ConfigError, match="give --pipeline-depth 1"):
        async with AsyncEngine(config):
            pass


ENDS: list[dict[str, Any]] = [
    {"structured_outputs": StructuredOutputs(regex="[a-z]{3,12}")},
    {"structured_outputs": StructuredOutputs(choice=("My lord", "My liege, my lord"))},
    {"stop": ["o"]},
    {"max_tokens": 7},
    {"max_tokens": 11, "n": 2},
    *({"stop_token_ids": list(range(begin, 2048, 16))} for begin in range(256, 272, 4)),
]


@pytest.mark.parametrize(
    "speculation",
    [
        NGRAM,
        SpeculationConfig(
            speculative_method="draft", draft_model="embedded", num_speculative_tokens=4
        ),
    ],
    ids=["ngram", "draft"],
)
async def test_logprobs_are_of_the_tokens_of_a_reply_that_ends_within_drafts(
    speculation: SpeculationConfig,
) -> None:
    config = EngineConfig(
        model=ModelConfig(model="embedded", max_model_len=128, dtype="float32"),
        cache=CacheConfig(block_size=4, num_kv_blocks=200),
        speculation=speculation,
    )
    async with AsyncEngine(config) as engine:

        async def lengths(text: str, way: dict[str, Any], kind: str) -> None:
            own = {"temperature": 0, "max_tokens": 40, "logprobs": 2, "output_kind": kind} | way
            num_tokens, num_told, num_counted = [0, 0], [0, 0], [0, 0]
            async for output in engine.generate(text, SamplingParams(**own)):
                assert len(output.logprobs or ()) == len(output.token_ids)
                num_tokens[output.index] += len(output.token_ids)
                num_told[output.index] += len(output.logprobs or ())
                num_counted[output.index] = output.num_output_tokens
            assert num_tokens == num_told == num_counted

        texts = ("a", "The king " * 30, "KING: My lord, my lord, my lord", "Once " * 20)
        kinds = ("delta", "final_only")
        ways = [{}, *ENDS]
        for _ in range(2):  # the second time, ends of the first are guessed, too
            await asyncio.gather(*(lengths(t, w, k) for t in texts for w in ways for k in kinds))
        stats = stats_of(engine)
        assert stats.num_accepted_tokens
