"""Thinking budgets: the end mark is forced, and what follows is as if the model had written it."""

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aioserve
from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import (
    CacheConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from aioserve.errors import RequestError
from aioserve.model_source.info import ModelInfo
from aioserve.outputs import RequestOutput
from aioserve.params import StructuredOutputs, ThinkingBudget
from aioserve.support.reasoning_tokens import ReasoningTokens
from aioserve.support.tokens import TokenBytes
from tests.kit import stats_of
from tests.slow import examples

EMBEDDED = Path(aioserve.__file__).parent / "model_source" / "embedded"
PROMPT = "What news, my lord?"
END = "</think>"
TOKENIZER = ModelInfo(ModelConfig()).tokenizer
MARK = TOKENIZER.encode(END, add_special_tokens=False)

# The loop is the subject of other tests; these load a model each.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])


def config(*, blocks: int = 256, speculation: str = "none", **scheduler: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(max_model_len=256, dtype="float32"),
        cache=CacheConfig(num_kv_blocks=blocks),
        scheduler=SchedulerConfig(max_num_seqs=8, **scheduler),
        speculation=SpeculationConfig(speculative_method=speculation),  # type: ignore[arg-type]
        runner=RunnerConfig(threads=1),
    )


def budget(max_tokens: int, **fields: Any) -> ThinkingBudget:
    given = {"start": "<think>", "end": END, "is_implied": True}
    return ThinkingBudget(max_tokens=max_tokens, **given | fields)


def params(limit: int | None, *, seed: int = 1, **fields: Any) -> SamplingParams:
    own = None if limit is None else budget(limit)
    given = {"max_tokens": 40, "temperature": 1.0, "seed": seed, "ignore_eos": True}
    return SamplingParams(**given | {"thinking_budget": own} | fields)


async def reply(
    engine: AsyncEngine, params: SamplingParams, prompt: str | Sequence[int] = PROMPT
) -> RequestOutput:
    whole = RequestOutput(request_id="")
    async for output in engine.generate(prompt, params):
        whole.merge(output)
    return whole


def count_reasoning(token_ids: Sequence[int]) -> int:
    """Reasoning tokens of a reply."""
    counter = ReasoningTokens(budget(0), TokenBytes(TOKENIZER), ())
    for token_id in token_ids:
        counter.append(token_id)
    return counter.count


async def as_if_written(engine: AsyncEngine, wanted: SamplingParams) -> list[int]:
    """The tokens of a reply for which the caller puts the mark behind the budget's tokens, and asks
    the model to go on: what a budget has to equal.
    """
    own = wanted.thinking_budget
    assert own is not None
    fields = {name: getattr(wanted, name) for name in FREE}
    free = SamplingParams(**fields)
    mark = TOKENIZER.encode(own.text, add_special_tokens=False)
    prompt = TOKENIZER.encode(PROMPT)
    said = (await reply(engine, free, prompt)).token_ids
    text = TOKENIZER.decode(said[: own.max_tokens + len(mark)])
    assert END not in text, "the model ends its reasoning by itself: take another seed"
    begun = [*said[: own.max_tokens], *mark][: free.max_tokens]
    if (left := (free.max_tokens or 0) - len(begun)) > 0:
        more = SamplingParams(
            **{name: getattr(wanted, name) for name in FREE} | {"max_tokens": left}
        )
        begun += (await reply(engine, more, [*prompt, *begun])).token_ids
    return begun


FREE = ("max_tokens", "temperature", "seed", "ignore_eos", "top_k", "logprobs")


async def test_any_budget_is_as_if_the_caller_had_written_the_mark() -> None:
    async with AsyncEngine(config()) as engine:
        for temperature in (0.0, 1.0):
            for limit in (0, 1, 7, 36, 99):
                wanted = params(limit, temperature=temperature, logprobs=2)
                found = await reply(engine, wanted)
                assert found.token_ids == await as_if_written(engine, wanted), limit
                assert found.logprobs is not None
                assert len(found.logprobs) == len(found.token_ids) == 40
                if limit < 30:
                    assert found.text.count(END) == 1
                    thought = found.text.partition(END)[0]
                    assert TOKENIZER.decode(found.token_ids[:limit], True) == thought


SEVERAL = [
    params(limit, seed=seed, temperature=temperature)
    for seed, limit in enumerate((0, 3, 11, 12, 25, None, 39))
    for temperature in (0.0, 1.0)
]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """The tokens of each of `SEVERAL` where the engine has no other request."""

    async def ask_in_turn() -> list[list[int]]:
        async with AsyncEngine(config()) as engine:
            return [(await reply(engine, one)).token_ids for one in SEVERAL]

    return asyncio.run(ask_in_turn())


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"pipeline_depth": 2}, marks=pytest.mark.slow),
        {"blocks": 18},  # requests are preempted, and computed anew
        pytest.param({"speculation": "ngram"}, marks=pytest.mark.slow),
        {"policy": "chunked_prefill", "options": {"chunk_size": 8}, "pipeline_depth": 2},
    ],
    ids=["steps ahead", "preempted", "drafts", "chunks"],
)
async def test_requests_of_one_batch_keep_to_their_own_budgets(
    changes: dict[str, Any], alone: list[list[int]]
) -> None:
    async with AsyncEngine(config(**changes)) as engine:
        together = await asyncio.gather(*(reply(engine, one) for one in SEVERAL))
        if "blocks" in changes:
            assert stats_of(engine).num_preemptions
    assert [found.token_ids for found in together] == alone


async def test_the_mark_is_drafted_where_the_next_steps_are_not_planned_ahead() -> None:
    async with AsyncEngine(config()) as engine:
        await reply(engine, params(5))
        num_steps = stats_of(engine).num_steps
        assert num_steps <= 40 - (len(MARK) - 2)


@settings(max_examples=examples(2, slow=8), deadline=None)
@given(limit=st.integers(0, 45), seed=st.integers(0, 2**32), is_ahead=st.booleans())
async def test_random_budgets_are_held_and_replayed(limit: int, seed: int, is_ahead: bool) -> None:
    own = config(pipeline_depth=2) if is_ahead else config(speculation="ngram")
    async with AsyncEngine(own) as engine:
        once = await reply(engine, params(limit, seed=seed))
        others = [params(limit, seed=seed), params(None, seed=seed), params(2, seed=7)]
        again, _, _ = await asyncio.gather(*(reply(engine, one) for one in others))
    assert once.token_ids == again.token_ids
    if END in once.text:
        assert count_reasoning(once.token_ids) <= limit
    else:  # the mark was cut off by max_tokens
        assert limit + len(MARK) > len(once.token_ids) == 40


async def test_a_grammar_binds_what_comes_after_the_forced_mark() -> None:
    grammar = (
        f'start: thought /[ \\n]{{0,4}}/ answer\nthought[suffix="{END}"]: /(.|\\n)*/\n'
        'answer: "{\\"n\\":" ("1" | "22") "}"'
    )
    for depth in (1, 2):
        async with AsyncEngine(config(pipeline_depth=depth)) as engine:
            wanted = [
                params(
                    limit,
                    seed=limit,
                    max_tokens=200,
                    ignore_eos=False,
                    structured_outputs=StructuredOutputs(grammar=grammar),
                )
                for limit in (0, 1, 9, 30)
            ]
            for found in await asyncio.gather(*(reply(engine, one) for one in wanted)):
                thought, _, answer = found.text.partition(END)
                assert json.loads(answer)["n"] in (1, 22), found.text
                assert count_reasoning(found.token_ids) <= 30
                assert len(thought) < 200


async def test_a_mark_of_one_special_token_is_forced_as_that_token(tmp_path: Path) -> None:
    shutil.copytree(EMBEDDED, tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (tmp_path / "model" / name).read_text()
        (tmp_path / "model" / name).write_text(text.replace("<|pad|>", END))
    model = ModelConfig(model=str(tmp_path / "model"), max_model_len=256, dtype="float32")
    own = EngineConfig(model=model, cache=CacheConfig(num_kv_blocks=64))
    async with AsyncEngine(own) as engine:
        special = ModelInfo(model).tokenizer.convert_tokens_to_ids(END)
        for limit in (0, 4):
            found = await reply(engine, params(limit, skip_special_tokens=False))
            assert found.token_ids.index(special) == limit
            assert found.token_ids.count(special) == 1
        assert END in found.text


async def test_a_text_before_the_mark_and_a_start_that_never_comes() -> None:
    async with AsyncEngine(config()) as engine:
        own = budget(3, forced=f"\nEnough.\n{END}")
        found = await reply(engine, params(None, thinking_budget=own))
        assert f"\nEnough.\n{END}" in found.text
        # The reply of a model that does not think is free: its budget never begins.
        free = await reply(engine, params(None))
        for limit in (0, 5):
            own = budget(limit, is_implied=False)
            assert (await reply(engine, params(None, thinking_budget=own))).text == free.text
        # Reasoning that the prompt has begun, and reasoning that it has ended.
        opened = await reply(engine, params(None, thinking_budget=own), f"{PROMPT}<think>\n")
        assert opened.text.count(END) == 1
        ended = await reply(engine, params(2), f"{PROMPT}<think>\n\n{END}\n\n")
        assert END not in ended.text


async def test_a_text_that_goes_on_behind_the_mark_is_forced_to_its_end() -> None:
    """As harmony's: the end of a message, and the header of another one."""
    fields = {"start": "[think]", "end": "[end]", "is_implied": False, "is_repeated": True}
    forced = "[end][start]final[text]"
    spoken = TOKENIZER.encode(forced, add_special_tokens=False)
    for depth in (1, 2):
        async with AsyncEngine(config(pipeline_depth=depth)) as engine:
            for limit in (0, 1, 8):
                own = params(None, thinking_budget=budget(limit, forced=forced, **fields))
                found = await reply(engine, own, f"{PROMPT}[think]")
                thought, _, rest = found.text.partition("[end]")
                assert rest.startswith("[start]final[text]")
                assert found.token_ids[limit : limit + len(spoken)] == spoken
                assert TOKENIZER.decode(found.token_ids[:limit], True) == thought
            free = await reply(engine, params(None))
            own = params(None, thinking_budget=budget(0, forced=forced, **fields))
            assert (await reply(engine, own)).text == free.text


async def test_stop_strings_stop_tokens_and_samples_go_with_a_budget() -> None:
    async with AsyncEngine(config()) as engine:
        found = await reply(engine, params(4, stop=END, temperature=0))
        assert (found.finish_reason, found.stop_reason) == ("stop", END)
        assert len(found.token_ids) == 4 + len(MARK)
        found = await reply(engine, params(4, stop_token_ids=(MARK[-1],), temperature=0))
        assert found.stop_reason == MARK[-1]
        texts: dict[int, str] = {}
        async for output in engine.generate(PROMPT, params(6, n=3)):
            texts[output.index] = texts.get(output.index, "") + output.text
        assert [text.count(END) for text in texts.values()] == [1, 1, 1]
        assert len(set(texts.values())) == 3
        penalized = await reply(
            engine, params(6, repetition_penalty=1.3, logit_bias={MARK[0]: -100})
        )
        assert penalized.text.count(END) == 1


async def test_budgets_that_cannot_be_held_are_refused_at_the_door() -> None:
    with pytest.raises(RequestError, match="at least 0 tokens, got -1"):
        budget(-1)
    with pytest.raises(RequestError, match="must hold the end mark"):
        budget(1, forced="Enough.")
    async with AsyncEngine(config()) as engine:
        with pytest.raises(RequestError, match="allowed_token_ids must hold the tokens that end"):
            await reply(engine, params(1, allowed_token_ids=(5, 6)))
        with pytest.raises(RequestError, match="must have at most 512 tokens"):
            await reply(engine, params(None, thinking_budget=budget(1, forced="a b " * 999 + END)))
    simulated = EngineConfig(runner=RunnerConfig(runner="simulated"))
    async with AsyncEngine(simulated) as engine:
        with pytest.raises(RequestError, match=r"thinking_budget cannot be served: .*no logits"):
            await reply(engine, params(1))
