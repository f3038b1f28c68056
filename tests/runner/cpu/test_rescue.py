"""A step that raises fails only the request that makes it raise; the others have their tokens."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path

import msgspec
import pytest
import torch

from aioserve.model_source.info import ModelInfo
from aioserve.outputs import ModelRunnerOutput
from aioserve.params import PoolingParams, SamplingParams
from aioserve.runner.attention.backend import LayerAttention, ModelInputs
from aioserve.runner.batch import rescue
from aioserve.runner.batch.input_batch import SHARED
from aioserve.runner.batch.rescue import NO_MEMORY
from aioserve.runner.cpu.executor import StepExecutor
from aioserve.runner.cpu.kv_memory import KVMemory
from aioserve.runner.cpu.load import load_on_cpu
from tests.models import VOCAB_SIZE
from tests.runner.driver import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Driver,
    MakeDriver,
    make_config,
    random_prompt,
)
from tests.slow import mostly_slow

POISON = VOCAB_SIZE - 1  # a token over which the forward pass of these tests raises

Watch = Callable[[ModelInputs], None]


class Forward:
    """The forward pass of a runner, behind something that may raise."""

    def __init__(self, runner: StepExecutor, watch: Watch) -> None:
        self._forward, self._watch = runner._model.forward, watch
        self.num_passes = 0
        self.longest = 0  # tokens of the passes that were done

    def __call__(self, inputs: ModelInputs, attention: LayerAttention) -> torch.Tensor:
        self.num_passes += 1
        self._watch(inputs)
        self.longest = max(self.longest, len(inputs.input_ids))
        return self._forward(inputs, attention)


def watched(driver: Driver, monkeypatch: pytest.MonkeyPatch, watch: Watch) -> Forward:
    forward = Forward(driver.runner, watch)
    monkeypatch.setattr(driver.runner._model, "forward", forward)
    return forward


def poisoned(inputs: ModelInputs) -> None:
    if POISON in inputs.input_ids:
        raise ArithmeticError("a poisoned token")


def too_long(most: int) -> Watch:
    def watch(inputs: ModelInputs) -> None:
        if len(inputs.input_ids) > most:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried too much")

    return watch


def prompts(count: int = 7) -> Iterator[tuple[str, list[int]]]:
    for seed in range(count):
        prompt = random_prompt(5 + 6 * seed, seed=seed)
        yield f"n{seed}", [token_id % POISON for token_id in prompt]


@pytest.fixture(scope="module")
def expected(model_path: Callable[..., Path]) -> dict[str, list[int]]:
    """What each of the prompts is answered alone."""
    found, config = {}, make_config(model_path("llama"))
    for name, prompt in prompts():
        driver = Driver(load_on_cpu(config, ModelInfo(config.model)), NUM_BLOCKS, BLOCK_SIZE)
        driver.add(name, prompt)
        found[name] = list(driver.generate(name, 8))
        driver.runner.close()
    return found


def finish_all(driver: Driver, names: list[str]) -> dict[str, list[int]]:
    """Eight tokens of each."""
    while any(len(driver.sequences[name].output) < 8 for name in names):
        driver.step({name: driver.sequences[name].lacking for name in names})
    return {name: driver.sequences[name].output[:8] for name in names}


@pytest.mark.parametrize(
    ("kind", "place"),
    mostly_slow(
        product(["llama", "mistral"], [0, 3, 7]), but=[("llama", 0), ("llama", 7), ("mistral", 3)]
    ),
)
def test_the_one_that_makes_a_step_raise_fails_alone(
    kind: str, place: int, make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = make_driver(kind)
    for name, prompt in prompts():
        alone.add(name, prompt)
    expected = finish_all(alone, [name for name, _ in prompts()])
    driver = make_driver(kind)
    forward = watched(driver, monkeypatch, poisoned)
    rows = list(prompts())
    rows.insert(place, ("culprit", [1, 2, POISON, 4]))
    for name, prompt in rows:
        driver.add(name, prompt)
    result = driver.step()
    assert list(result.failed) == ["culprit"]
    assert "ArithmeticError" in result.failed["culprit"]
    assert forward.num_passes <= 1 + 2 * 3  # eight are halved three times
    driver.finish("culprit")
    assert finish_all(driver, list(expected)) == expected


def test_several_culprits_in_prompts_and_decodes_fail_alone(
    expected: dict[str, list[int]], make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver()
    for name, prompt in prompts(6):
        driver.add(name, prompt)
    driver.step()
    driver.step()
    driver.add("a", [5, POISON])
    driver.add("b", [POISON])
    watched(driver, monkeypatch, poisoned)
    assert sorted(driver.step().failed) == ["a", "b"]
    driver.finish("a")
    driver.finish("b")
    names = [name for name, _ in prompts(6)]
    assert finish_all(driver, names) == {name: expected[name] for name in names}


def test_an_error_that_does_not_come_again_fails_nobody(
    expected: dict[str, list[int]], make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, errors = make_driver(), [OSError("once")]

    def watch(inputs: ModelInputs) -> None:
        if errors:
            raise errors.pop()

    watched(driver, monkeypatch, watch)
    for name, prompt in prompts():
        driver.add(name, prompt)
    assert driver.step().failed == {}
    assert finish_all(driver, list(expected)) == expected


@pytest.mark.parametrize("error", [OSError("once"), MemoryError()])
def test_an_error_that_does_not_come_again_does_not_fail_the_only_one(
    error: Exception,
    expected: dict[str, list[int]],
    make_driver: MakeDriver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, errors = make_driver(), [error]

    def watch(inputs: ModelInputs) -> None:
        if errors:
            raise errors.pop()

    (name, prompt), *_ = prompts()
    driver.add(name, prompt)
    driver.step()
    watched(driver, monkeypatch, watch)
    assert driver.step().failed == {}
    assert finish_all(driver, [name]) == {name: expected[name]}


def test_where_everything_raises_there_is_an_end(
    make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rescue, "MAX_FAILURES", 5)
    driver = make_driver()
    forward = watched(driver, monkeypatch, lambda inputs: 1 / 0)
    for index in range(8):
        driver.add(str(index), [index])
    assert len(driver.step().failed) == 8
    assert forward.num_passes == 1 + 5


def test_who_reads_what_a_failed_request_was_to_write_fails_too(
    expected: dict[str, list[int]], make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver()
    watched(driver, monkeypatch, poisoned)
    prefix = random_prompt(24)
    driver.add("filler", [*prefix, POISON])
    driver.add("sharer", prefix + random_prompt(9, seed=2))
    for name, prompt in prompts():
        driver.add(name, prompt)
        if name == "n2":
            break
    filling = driver.sequences["filler"]
    driver.allocate(filling, filling.lacking)
    driver.share_prefix("sharer", "filler", num_blocks=3)
    result = driver.step({"sharer": 9, "n0": 5, "filler": 25, "n1": 11, "n2": 17})
    assert sorted(result.failed) == ["filler", "sharer"]
    assert result.failed["sharer"] == SHARED
    del driver.sequences["sharer"], driver.sequences["filler"]
    names = ["n0", "n1", "n2"]
    assert finish_all(driver, names) == {name: expected[name] for name in names}


def test_a_step_that_was_planned_ahead_does_not_read_what_is_not_written(
    expected: dict[str, list[int]], make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver()
    watched(driver, monkeypatch, poisoned)
    prefix = random_prompt(24)
    driver.add("filler", [*prefix, POISON])
    (name, prompt), *_ = prompts()
    driver.add(name, prompt)
    driver.add("other", [8, 9])
    in_flight = driver.schedule({"filler": 25, name: len(prompt)})
    driver.add("sharer", prefix + random_prompt(9, seed=2))
    driver.share_prefix("sharer", "filler", num_blocks=3)
    ahead = driver.schedule({"filler": 1, "sharer": 9, name: 1, "other": 2})
    assert list(driver.execute(in_flight).failed) == ["filler"]
    result = driver.execute(ahead)
    assert sorted(result.failed) == ["filler", "sharer"]
    assert result.failed["sharer"] == SHARED
    # Once they have ended, their blocks are as good as any.
    blocks = driver.sequences["filler"].block_ids
    driver.finish("filler")
    driver.finished.append("sharer")
    del driver.sequences["sharer"], driver.sequences["other"]
    assert driver.free_blocks[-len(blocks) :] == blocks
    driver.add("next", dict(prompts())["n3"])
    assert driver.generate("next", 8) == expected["n3"]
    assert finish_all(driver, [name]) == {name: expected[name]}


def test_what_lacks_memory_is_computed_in_smaller_steps(
    expected: dict[str, list[int]], make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver()
    forward = watched(driver, monkeypatch, too_long(9))
    for name, prompt in prompts():
        driver.add(name, prompt)
    assert driver.step().failed == {}
    assert forward.longest <= 9
    assert finish_all(driver, list(expected)) == expected


def test_what_lacks_memory_even_for_one_token_ends(
    expected: dict[str, list[int]], make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver()

    def watch(inputs: ModelInputs) -> None:
        if POISON in inputs.input_ids:
            raise MemoryError

    watched(driver, monkeypatch, watch)
    driver.add("large", [1, 2, 3, POISON])
    (name, prompt), *_ = prompts()
    driver.add(name, prompt)
    assert driver.step().failed == {"large": NO_MEMORY}
    driver.finish("large")
    assert finish_all(driver, [name]) == {name: expected[name]}


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_a_step_that_raises_at_once_still_gives_the_rows_of_those_who_left_back(
    kind: str, make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is raised where: who left is told once."""
    driver = make_driver(kind)
    for index in range(8):  # as many as there are rows
        driver.add(f"old{index}", [1, 2, index], SamplingParams(temperature=0, logit_bias={3: 1.0}))
    driver.step()
    batch = driver.runner._batch
    for part in batch.parts:
        monkeypatch.setattr(part, "drop", lambda row, **_: 1 / 0)
    for index in range(8):
        driver.finish(f"old{index}")
    driver.add("lost", [1, 2, 3])
    with monkeypatch.context() as broken:
        broken.setattr(driver.runner._model, "forward", lambda *inputs: 1 / 0)
        with suppress(ZeroDivisionError):
            assert list(driver.step().failed) == ["lost"]
    driver.finish("lost")
    for index in range(8):
        driver.add(f"new{index}", [1, 2, index])
    assert driver.step().failed == {}
    assert len(batch) == 8


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError()])
def test_lack_of_memory_is_known_without_words(
    error: Exception,
    expected: dict[str, list[int]],
    make_driver: MakeDriver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = make_driver()

    def watch(inputs: ModelInputs) -> None:
        if len(inputs.input_ids) > 9:
            raise error

    watched(driver, monkeypatch, watch)
    for name, prompt in prompts():
        driver.add(name, prompt)
    assert driver.step().failed == {}
    assert finish_all(driver, list(expected)) == expected


def test_steps_stay_smaller_for_a_while_once_memory_was_short(
    expected: dict[str, list[int]], make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No later step fails first; then a whole one is tried again."""
    monkeypatch.setattr(rescue, "NUM_SMALL_STEPS", 6)
    driver, num_failed = make_driver(), [0]

    def watch(inputs: ModelInputs) -> None:
        if len(inputs.input_ids) > 3:
            num_failed[0] += 1
            raise MemoryError

    for name, prompt in prompts():
        driver.add(name, prompt)
    driver.step()  # all are decoded from here on
    watched(driver, monkeypatch, watch)
    found = []
    for _ in range(7):
        assert driver.step({name: 1 for name, _ in prompts()}).failed == {}
        found.append(num_failed[0])
    assert found == [1, 1, 1, 1, 1, 1, 2]
    assert finish_all(driver, list(expected)) == expected


def test_prompts_that_are_looked_at_are_looked_at_once(
    make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In halves, and in pieces for lack of memory."""
    tells = SamplingParams(temperature=0, prompt_logprobs=2)
    mean = PoolingParams(pooling="mean")
    results: list[ModelRunnerOutput] = []
    for most in (10_000, 6):
        driver = make_driver()
        hidden = driver.runner._model.halves.hidden
        watch = too_long(most)

        def limited(
            inputs: ModelInputs,
            attention: LayerAttention,
            hidden: Callable[..., torch.Tensor] = hidden,
            watch: Watch = watch,
        ) -> torch.Tensor:
            watch(inputs)
            return hidden(inputs, attention)

        monkeypatch.setattr(driver.runner._model.halves, "hidden", limited)
        watched(driver, monkeypatch, watch)
        driver.add("tells", random_prompt(30), tells)
        driver.add("pooled", random_prompt(31), pooling=mean)
        driver.add("plain", random_prompt(12))
        results.append(driver.step())
    whole, pieces = results
    assert pieces.failed == {}
    assert pieces.sampled_token_ids == whole.sampled_token_ids
    told = [result.prompt_logprobs["tells"] for result in results]
    assert [entry.top_token_ids for entry in told[0]] == [entry.top_token_ids for entry in told[1]]
    assert len(told[0]) == 29
    torch.testing.assert_close(
        torch.tensor(pieces.pooled["pooled"]), torch.tensor(whole.pooled["pooled"])
    )


def test_a_row_whose_token_cannot_be_chosen_fails_alone(
    expected: dict[str, list[int]], make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver()
    for name, prompt in prompts(4):
        driver.add(name, prompt)
    driver.add("odd", [1, 2], SamplingParams(temperature=0, logit_bias={3: 1.0}))
    driver.add("late", [1, 2], SamplingParams(temperature=0, presence_penalty=1.0))
    driver.step()
    edits = driver.runner.parts.sampling.rows
    odd, late = (edits[driver.runner._batch._rows[name]] for name in ("odd", "late"))
    monkeypatch.setattr(odd, "apply", lambda logits, num_tokens: 1 / 0)
    monkeypatch.setattr(late, "append", lambda token_id: 1 / 0)
    result = driver.step()
    assert sorted(result.failed) == ["late", "odd"]
    driver.finish("odd")
    driver.finish("late")
    names = [name for name, _ in prompts(4)]
    assert finish_all(driver, names) == {name: expected[name] for name in names}


def test_a_request_that_does_not_get_into_the_batch_fails_alone(
    expected: dict[str, list[int]], make_driver: MakeDriver
) -> None:
    driver = make_driver()
    for name, prompt in prompts(3):
        driver.add(name, prompt)
    driver.add("stranger", [1, 2, 3])
    step = driver.schedule({name: s.lacking for name, s in driver.sequences.items()})
    step.scheduled_new_reqs[-1] = msgspec.structs.replace(
        step.scheduled_new_reqs[-1], adapter_id="unknown"
    )
    result = driver.execute(step)
    assert "KeyError" in result.failed["stranger"]
    driver.step({name: 1 for name, _ in prompts(3)} | {"stranger": 1})  # it was planned ahead
    driver.finish("stranger")
    assert len(driver.runner._batch) == 3
    names = [name for name, _ in prompts(3)]
    assert finish_all(driver, names) == {name: expected[name] for name in names}


def test_blocks_that_a_prompt_lacks_memory_for_fail_it_alone(
    expected: dict[str, list[int]], make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver()
    driver.free_blocks.sort(reverse=True)  # from 0 upwards
    commit, most = driver.runner._backend.memory.commit, 4

    def limited(num_blocks: int, soon: int = 0) -> None:
        if num_blocks > most:
            raise MemoryError
        commit(num_blocks, soon)

    monkeypatch.setattr(driver.runner._backend.memory, "commit", limited)
    (name, prompt), *_ = prompts()
    driver.add(name, prompt)
    driver.add("large", random_prompt(8 * BLOCK_SIZE))
    assert driver.step().failed == {"large": NO_MEMORY}
    driver.finish("large")
    driver.free_blocks.sort(reverse=True)
    assert finish_all(driver, [name]) == {name: expected[name]}


def test_parts_of_a_step_ask_for_the_memory_of_the_blocks_that_running_requests_got(
    make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver("llama")
    names = [name for name, _ in prompts(4)]
    for name, prompt in prompts(4):
        driver.add(name, prompt)
    driver.step({name: driver.sequences[name].lacking for name in names})
    committed, commit = list[int](), KVMemory.commit

    def noting(self: KVMemory, num_blocks: int, *, soon: int = 0) -> None:
        committed.append(max(num_blocks, soon))
        commit(self, num_blocks, soon=soon)

    monkeypatch.setattr(KVMemory, "commit", noting)
    watched(driver, monkeypatch, too_long(2))  # so that every step is run in parts
    for _ in range(3 * BLOCK_SIZE):
        driver.step({name: 1 for name in names})
        highest = max(block for name in names for block in driver.sequences[name].block_ids)
    assert max(committed) == highest + 1
