"""How likely a prompt's own tokens are: the same under every policy, cache and pressure or not."""

import asyncio
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import CacheConfig, ModelConfig, RunnerConfig, SchedulerConfig
from aioserve.errors import RequestError
from aioserve.outputs import RequestOutput, TokenLogprobs
from aioserve.params import RUNNER_PARAMETERS
from aioserve.runner.interface import RunnerInfo
from aioserve.runner.simulated import SimulatedRunner
from tests.greedy import GreedyReference
from tests.kit import stats_of
from tests.models import VOCAB_SIZE, make_model
from tests.server.bad_bodies import good_numbers
from tests.slow import mostly_slow

POLICIES = sorted(path.stem for path in Path("policies").glob("[a-z]*.py"))
WHOLE_PROMPTS = ("fcfs", "priority")
MAX_MODEL_LEN = 256
SIMULATED = EngineConfig(runner=RunnerConfig(runner="simulated", step_base_ms=0.1))

NUM_TOKENS = 30

# The loop is the subject of other tests; these load a model each.
on_one_loop = pytest.mark.asyncio(loop_factories=["uvloop"])


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def reference(model_path: Path) -> tuple[Any, list[Any]]:
    """The model in `transformers`, and what it says to each prompt."""
    model = GreedyReference(model_path, torch.float32)
    return model._model, [model.tokens(prompt, NUM_TOKENS) for prompt in make_prompts()]


def config(model_path: Path, **scheduler: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(
            model=str(model_path),
            max_model_len=MAX_MODEL_LEN,
            dtype="float32",
            skip_tokenizer_init=True,
        ),
        cache=CacheConfig(num_kv_blocks=48, block_size=8),  # less than 12 requests want together
        scheduler=SchedulerConfig(max_num_seqs=12, **scheduler),
        runner=RunnerConfig(threads=1),
    )


def make_prompts() -> list[list[int]]:
    """Twelve, of 1 to 77 tokens; half of them begin alike."""
    chance = random.Random(5)
    shared = [chance.randrange(VOCAB_SIZE) for _ in range(20)]
    return [
        (shared if i % 2 else [])[: 7 * i]
        + [chance.randrange(VOCAB_SIZE) for _ in range(1 + 7 * i - min(20, 7 * i) * (i % 2))]
        for i in range(12)
    ]


async def ask(
    engine: AsyncEngine, prompt: list[int], num_tokens: int = 20, **fields: Any
) -> list[RequestOutput]:
    given = {"temperature": 0, "ignore_eos": True, "detokenize": False, "max_tokens": num_tokens}
    stream = engine.generate(prompt, SamplingParams(**given | fields))
    return [output async for output in stream]


@torch.inference_mode()
def check(output: RequestOutput, prompt: list[int], model: Any) -> None:
    """The log probabilities of `prompt`, with two alternatives, against a forward pass of it."""
    assert output.prompt_logprobs is not None
    first, *found = output.prompt_logprobs
    assert first is None
    assert len(found) == len(prompt) - 1
    expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for entry, row, token_id in zip(found, expected, prompt[1:], strict=False):
        assert entry is not None
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        assert entry.top_token_ids == row.topk(2).indices.tolist()
        assert entry.rank == 1 + int((row > row[token_id]).sum())


@on_one_loop
@pytest.mark.parametrize(
    "policy", mostly_slow(POLICIES, but=["chunked_prefill", "fcfs", "latency_budget", "mlfq"])
)
async def test_every_policy_tells_prompts_in_pieces_and_under_pressure(
    policy: str, model_path: Path, reference: tuple[Any, list[Any]]
) -> None:
    number, prompts = POLICIES.index(policy), make_prompts()
    scheduler: dict[str, Any] = {"policy": policy, "pipeline_depth": 1 + number % 2}
    if policy not in WHOLE_PROMPTS:
        scheduler["max_num_batched_tokens"] = 13 + 9 * number
    model, expected = reference
    async with AsyncEngine(config(model_path, **scheduler)) as engine:
        replies = await asyncio.gather(
            *(
                ask(engine, prompt, NUM_TOKENS, prompt_logprobs=None if i % 3 == 0 else 2)
                for i, prompt in enumerate(prompts)
            )
        )
        stats = stats_of(engine)
        assert stats.num_preemptions > 0
    for i, (prompt, outputs) in enumerate(zip(prompts, replies, strict=True)):
        tokens = [token_id for output in outputs for token_id in output.token_ids]
        assert tokens == expected[i]
        assert all(output.prompt_logprobs is None for output in outputs[1:])
        if i % 3 == 0:
            assert outputs[0].prompt_logprobs is None
        else:
            check(outputs[0], prompt, model)


@on_one_loop
async def test_the_prefix_cache_is_written_and_not_read(
    model_path: Path, reference: tuple[Any, list[Any]]
) -> None:
    model, prompt = reference[0], make_prompts()[-1]
    async with AsyncEngine(config(model_path)) as engine:
        for _ in range(2):
            (asked,) = await ask(engine, prompt, 0, prompt_logprobs=2)
            assert asked.num_cached_tokens == 0
            check(asked, prompt, model)
            (other,) = await ask(engine, prompt, 1)
            assert other.num_cached_tokens == 72


@on_one_loop
async def test_nothing_is_generated_where_only_the_prompt_is_asked_about(model_path: Path) -> None:
    async with AsyncEngine(config(model_path, policy="chunked_prefill")) as engine:
        (output,) = await ask(engine, [1, 2, 3], 0, prompt_logprobs=0, logprobs=1)
        assert (output.token_ids, output.num_output_tokens, output.logprobs) == ([], 0, None)
        assert output.finish_reason == "length"
        assert output.prompt_logprobs is not None
        assert [entry and entry.top_token_ids for entry in output.prompt_logprobs] == [None, [], []]
        assert engine.metrics.num_generation_tokens == 0


async def test_of_several_samples_the_first_tells_the_prompt_and_the_others_share_it() -> None:
    async with AsyncEngine(SIMULATED) as engine:
        outputs = await ask(
            engine, list(range(40)), 2, n=3, prompt_logprobs=1, output_kind="final_only"
        )
    first, *others = sorted(outputs, key=lambda output: output.index)
    assert first.prompt_logprobs == [
        None,
        *(TokenLogprobs(0.0, 1, [token_id], [0.0]) for token_id in range(1, 40)),
    ]
    assert [output.prompt_logprobs for output in others] == [None, None]
    assert all(output.num_cached_tokens == 32 for output in others)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs must be between 0 and 20, got 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be between 0 and 20, got -1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": -1, "prompt_logprobs": 0}, "max_tokens must be at least 1, got -1"),
        ({"max_tokens": 0, "prompt_logprobs": 0, "n": 2}, "n must be 1 with max_tokens 0, got 2"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", RUNNER_PARAMETERS)
async def test_what_a_runner_does_not_serve_is_refused_at_the_door(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def load(runner: SimulatedRunner) -> RunnerInfo:
        return msgspec.structs.replace(runner.info, parameters=frozenset())

    monkeypatch.setattr(SimulatedRunner, "load", load)
    async with AsyncEngine(SIMULATED) as engine:
        assert engine.runner_parameters == set()
        with pytest.raises(RequestError, match=f"{name} cannot be served") as caught:
            await ask(engine, [1, 2], **{name: good_numbers()[name]})
        assert caught.value.param == name
