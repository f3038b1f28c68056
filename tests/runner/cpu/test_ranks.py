"""Two ranks give the tokens of one, whatever a step holds.

The second rank is a thread here, told by the same messages: what processes add is in
tests/server/test_ranks.py.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from aioserve.config import EngineConfig, SpeculationConfig
from aioserve.errors import ConfigError, RequestFailedError, RunnerDeadError
from aioserve.gpu.tensor_parallel.group import GroupedRanks, SharedError
from aioserve.gpu.tensor_parallel.plan import check_model, check_settings
from aioserve.gpu.tensor_parallel.processes import Sampled, Step, decode, encode
from aioserve.model_source.directory import Directory
from aioserve.model_source.info import ModelInfo
from aioserve.outputs import ModelRunnerOutput
from aioserve.params import PoolingParams, SamplingParams
from aioserve.runner.cpu.executor import StepExecutor
from aioserve.runner.cpu.fused import WholeDecoder
from aioserve.runner.cpu.load import load_on_cpu
from aioserve.runner.cpu.sampler import SampledTokens, sample
from aioserve.runner.ranks import Ranks
from aioserve.scheduler.output import SchedulerOutput
from tests.models import VOCAB_SIZE, make_model
from tests.processes import COMPUTING_SECONDS
from tests.runner.driver import BLOCK_SIZE, GREEDY, NUM_BLOCKS, Driver, make_config
from tests.variants import VARIANTS

_END = b""
# `from_pretrained` changes functions of torch while it reads.
_reading = threading.Lock()


class Pair:
    """Both ranks as one runner."""

    def __init__(self, config: EngineConfig, meeting: Path) -> None:
        self._messages: SimpleQueue[bytes] = SimpleQueue()
        self._thread = ThreadPoolExecutor(1)
        self.fails_to_sample = False
        self._config, self._meeting = config, meeting
        second = self._thread.submit(self._load, 1, self._hear_sampled)
        self.first = self._load(0, self._sample)
        self.second: StepExecutor = second.result()
        self._running: Future[None] = self._thread.submit(self._run)
        self.info = self.first.info

    def _load(self, rank: int, choose: Any) -> StepExecutor:
        info = ModelInfo(self._config.model)
        check_model(self._config, info)
        ranks = GroupedRanks(rank, 2, self._meeting, COMPUTING_SECONDS)
        executor = load_on_cpu(self._config, info, ranks=ranks)
        executor.choose = choose
        return executor

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self._messages.put(encode(Step(step)))
        return self.first.execute_model(step)

    def _sample(self, *arguments: Any) -> SampledTokens:
        if self.fails_to_sample:
            self.fails_to_sample = False
            self._messages.put(encode(Sampled(None)))
            raise RuntimeError("as asked")
        sampled = sample(*arguments)
        self._messages.put(encode(Sampled(sampled.token_ids.tolist())))
        return sampled

    def _hear_sampled(self, *_: Any) -> SampledTokens:
        told = decode(self._messages.get())
        assert isinstance(told, Sampled)
        if told.token_ids is None:
            raise RequestFailedError("as told")
        return SampledTokens(np.array(told.token_ids, dtype=np.int64), {})

    def _run(self) -> None:
        while (data := self._messages.get()) != _END:
            told = decode(data)
            assert isinstance(told, Step)
            with contextlib.suppress(RequestFailedError):
                self.second.execute_model(told.step)

    def close(self) -> None:
        self._messages.put(_END)
        self._running.result()
        self._thread.shutdown()
        self.first.close()
        self.second.close()


@pytest.fixture
def make_pair(
    model_path: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[Driver, Pair]]]:
    """`make_pair(kind)`: a driver of two ranks, and the two."""
    load_module = Directory.load_module

    def one_at_a_time(*arguments: Any, **options: Any) -> Any:
        with _reading:
            return load_module(*arguments, **options)

    monkeypatch.setattr(Directory, "load_module", one_at_a_time)
    pairs: list[Pair] = []

    def make(kind: str = "llama", **model: Any) -> tuple[Driver, Pair]:
        sections = {
            "speculation": model.pop("speculation", SpeculationConfig(speculative_method="none"))
        }
        config = _with_ranks(make_config(model_path(kind), **model), **sections)
        pair = Pair(config, tmp_path / str(len(pairs)))
        pairs.append(pair)
        return Driver(pair, NUM_BLOCKS, BLOCK_SIZE), pair  # type: ignore[arg-type]

    yield make
    for pair in pairs:
        pair.close()


def _with_ranks(config: EngineConfig, size: int = 2, **sections: Any) -> EngineConfig:
    runner = msgspec.structs.replace(config.runner, tensor_parallel_size=size, threads=None)
    return msgspec.structs.replace(config, runner=runner, **sections)


HIDDEN_SIZE, TIED = 64, ("qwen3", "gemma2")
PROMPTS = [[7, 3, 9] * 13, [5], list(range(100, 145))]


def serve(driver: Driver) -> tuple[dict[str, list[int]], list[float]]:
    """A prompt in pieces beside decodes, a shared prefix, a preemption, several kinds of rows."""
    driver.add("a", PROMPTS[0], SamplingParams(temperature=0, logprobs=3))
    driver.add("b", PROMPTS[1], SamplingParams(temperature=1.0, seed=3, frequency_penalty=0.5))
    driver.step({"a": 20, "b": 1})
    driver.step({"a": 19, "b": 1})
    driver.add("c", PROMPTS[0] + [1, 2], GREEDY)
    driver.share_prefix("c", "a", len(PROMPTS[0]) // BLOCK_SIZE)
    driver.step()
    driver.preempt("b")
    driver.step({"a": 1, "c": 1})
    driver.add("d", PROMPTS[2], SamplingParams(temperature=0, prompt_logprobs=2))
    driver.add("e", PROMPTS[2], pooling=PoolingParams(pooling="mean", normalize=False))
    told = driver.step().prompt_logprobs["d"]
    vector = driver.sequences["e"].vector
    assert vector is not None
    driver.finish("e")
    for _ in range(6):
        driver.step()
    numbers = [entry.logprob for entry in (*told, *driver.sequences["a"].logprobs)]
    outputs = {name: sequence.output for name, sequence in driver.sequences.items()}
    return outputs, [*numbers, *vector.tolist()]


# Fused, with biases, with norms of heads and a tied head, with some heads that do not turn; modules
# of `transformers` with soft caps; the same with attention that every rank has whole.
@pytest.mark.parametrize(
    "kind",
    [
        *("llama", "qwen3", "gemma2"),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen2", "smollm3", "olmo2")),
    ],
)
def test_two_ranks_give_the_tokens_of_one_with_half_of_its_weights(
    kind: str, make_driver: Callable[..., Driver], make_pair: Callable[..., tuple[Driver, Pair]]
) -> None:
    one = make_driver(kind, dtype="float32")
    two, pair = make_pair(kind, dtype="float32")
    (expected, expected_numbers), (found, numbers) = serve(one), serve(two)
    assert found == expected
    assert numbers == pytest.approx(expected_numbers, rel=1e-4, abs=1e-4)
    assert len({len(output) for output in found.values()}) > 1
    alone = one.runner._model
    table = VOCAB_SIZE * HIDDEN_SIZE
    in_layers = alone.num_parameters - table * (1 if kind in TIED else 2)
    heads = 1 if kind == "olmo2" else 2
    is_whole = VARIANTS != ["off"] and kind not in ("gemma2", "olmo2")
    for rank in (pair.first, pair.second):
        model = rank._model
        own = model.num_parameters - table - table // 2  # the embedding is whole, the head is not
        assert 0.5 <= own / in_layers < 0.52  # norms are whole as well
        assert model.kv_cache_spec.bytes_per_token * heads == alone.kv_cache_spec.bytes_per_token
        assert rank.info.num_kv_blocks == NUM_BLOCKS
        assert model.is_compiled is alone.is_compiled is is_whole
        if model.is_compiled:
            assert type(model.decoder) is type(alone.decoder) is WholeDecoder  # type: ignore[attr-defined]


def test_codes_of_the_pool_are_those_of_one_rank(
    make_driver: Callable[..., Driver], make_pair: Callable[..., tuple[Driver, Pair]]
) -> None:
    int8 = {"kv_cache_dtype": "int8", "dtype": "float32"}
    expected, _ = serve(make_driver("qwen3", **int8))
    assert serve(make_pair("qwen3", **int8)[0])[0] == expected


def test_numbers_that_no_message_holds_are_for_the_first_rank_alone(
    make_driver: Callable[..., Driver], make_pair: Callable[..., tuple[Driver, Pair]]
) -> None:
    outputs = []
    for driver in (make_driver(dtype="float32"), make_pair(dtype="float32")[0]):
        driver.add("a", PROMPTS[0], SamplingParams(top_k=1 << 70, seed=1, max_tokens=1 << 70))
        outputs.append(driver.generate("a", 4))
    assert outputs[0] == outputs[1]


def test_a_step_whose_tokens_cannot_be_chosen_is_lost_alone(
    make_driver: Callable[..., Driver], make_pair: Callable[..., tuple[Driver, Pair]]
) -> None:
    alone = make_driver(dtype="float32")
    alone.add("b", PROMPTS[2])
    expected = alone.generate("b", 8)
    driver, pair = make_pair(dtype="float32")
    driver.add("b", PROMPTS[2])
    driver.generate("b", 4)
    driver.add("a", PROMPTS[0])
    pair.fails_to_sample = True
    with pytest.raises(RuntimeError, match="as asked"):
        driver.step({"a": len(PROMPTS[0])})
    driver.finish("a")
    assert driver.generate("b", 8) == expected


def test_a_rank_that_hangs_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    def meet(rank: int) -> Ranks:
        return GroupedRanks(rank, 2, tmp_path / "meeting", COMPUTING_SECONDS)

    with ThreadPoolExecutor(2) as pool:
        first, _ = pool.map(meet, range(2))
    first._group._set_default_timeout(timedelta(seconds=0.05))
    message = rf"not answered for {COMPUTING_SECONDS:.0f} s \(runner.rank_timeout\)"
    with pytest.raises(RunnerDeadError, match=message):
        first.add_up(torch.zeros(4))


@pytest.mark.parametrize("failing", [0, 1])
def test_all_ranks_hear_why_one_of_them_could_not_do_it(failing: int, tmp_path: Path) -> None:
    def work(rank: int) -> None:
        ranks = GroupedRanks(rank, 2, tmp_path / "meeting", COMPUTING_SECONDS)
        with ranks.together():
            pass
        with ranks.together():
            if rank == failing:
                raise MemoryError("no room " + "é" * 2000)

    with ThreadPoolExecutor(2) as pool:
        works = [pool.submit(work, rank) for rank in range(2)]
    for done in works:
        error = done.exception()
        assert isinstance(error, SharedError)
        assert "MemoryError: no room é" in str(error)
        assert str(error).startswith("rank 1: ") is (failing == 1)


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("llama", 4, "4, but LlamaForCausalLM has 2 KV heads, which is no multiple"),
        ("gpt2", 2, "2, but there is no plan for GPT2LMHeadModel, here or in transformers"),
    ],
)
def test_a_model_that_cannot_be_shared_out_is_refused(
    kind: str, size: int, message: str, model_path: Callable[..., Path]
) -> None:
    config = _with_ranks(make_config(model_path(kind)), size)
    with pytest.raises(ConfigError, match=message) as error:
        check_model(config, ModelInfo(config.model))
    assert "\n" not in str(error.value)


def test_a_width_that_cannot_be_shared_out_is_refused(tmp_path: Path) -> None:
    config = _with_ranks(make_config(make_model("llama", tmp_path, intermediate_size=99)))
    with pytest.raises(ConfigError, match="has 99 numbers between the layers of its MLP"):
        check_model(config, ModelInfo(config.model))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"runner": {"threads": 3}}, "runner.threads: give a multiple of 2, not 3"),
        ({"runner": {"runner": "simulated"}}, "tensor_parallel_size is 2, which has no effect"),
        (
            {"runner": {"tensor_parallel_size": 1, "rank_timeout": 5}},
            "rank_timeout is 5.0, which has no effect: runner.tensor_parallel_size is 1",
        ),
    ],
)
def test_settings_that_do_not_go_with_ranks_are_refused(
    settings: dict[str, dict[str, Any]], message: str
) -> None:
    settings["runner"] = {"tensor_parallel_size": 2, **settings.get("runner", {})}
    config = EngineConfig(**settings)

    def check() -> None:
        config.check_effects()
        check_settings(config)

    with pytest.raises(ConfigError, match=message) as error:
        check()
    assert "\n" not in str(error.value)


def test_drafts_of_the_first_are_verified_by_both(
    make_driver: Callable[..., Driver], make_pair: Callable[..., tuple[Driver, Pair]]
) -> None:
    prompt = list(range(100, 100 + 5 * BLOCK_SIZE))
    alone = make_driver(dtype="float32")
    alone.add("a", prompt)
    expected = alone.generate("a", 8)
    ngram = SpeculationConfig(speculative_method="ngram")
    driver, pair = make_pair(dtype="float32", speculation=ngram)
    assert [rank.parts.drafter is None for rank in (pair.first, pair.second)] == [
        False,
        True,
    ]
    driver.add("a", prompt)
    driver.step()
    drafts = [expected[1], (expected[2] + 1) % VOCAB_SIZE, expected[3]]
    step = msgspec.structs.replace(
        driver.schedule({"a": 1}),
        num_scheduled_tokens={"a": 1 + len(drafts)},
        total_num_scheduled_tokens=1 + len(drafts),
        scheduled_spec_decode_tokens={"a": drafts},
    )
    found = driver.execute(step).sampled_token_ids
    assert found == [expected[1:3]]
    sequence = driver.sequences["a"]
    sequence.num_scheduled_ahead, sequence.num_computed = 0, sequence.num_computed + 1
    assert driver.generate("a", 8) == expected
