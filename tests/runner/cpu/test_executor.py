"""The runner against `transformers.generate`: same greedy tokens, however a step is composed."""

import asyncio
import random
from typing import Literal

import pytest
import torch

from aioserve import AsyncEngine
from aioserve.config import EngineConfig, ModelConfig, SpeculationConfig
from aioserve.params import SamplingParams
from aioserve.runner.attention.backend import LayerAttention, ModelInputs
from aioserve.runner.batch.input_batch import InputBatch
from aioserve.runner.cpu import executor, kv_memory
from tests.models import EACH_KIND_ONCE, KINDS_AND_FUSED, VOCAB_SIZE
from tests.runner.cpu.resident import is_resident
from tests.runner.driver import BLOCK_SIZE, Driver, Generate, MakeDriver, random_prompt
from tests.slow import mostly_slow


def assert_all_match(driver: Driver, kind: str, generate: Generate) -> None:
    for sequence in driver.sequences.values():
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        assert sequence.output == generate(kind, prompt, len(sequence.output))


@pytest.mark.parametrize(("kind", "fused"), mostly_slow(KINDS_AND_FUSED, but=EACH_KIND_ONCE))
def test_mixed_chunks_and_decodes_equal_generate(
    kind: str, fused: bool, make_driver: MakeDriver, generate_reference: Generate
) -> None:
    driver = make_driver(kind, fused=fused)
    for name, length in {"a": 1, "b": 17, "c": 70, "d": 300}.items():
        driver.add(name, random_prompt(length))
    driver.step({"a": 1, "b": 5, "c": 70})
    driver.step({"d": 129, "a": 1, "b": 12})
    driver.step({"b": 1, "d": 64, "c": 1})
    while driver.sequences["d"].lacking > 30:
        driver.step({"a": 1, "d": 30, "b": 1, "c": 1})
    for _ in range(12):
        driver.step()
    assert all(len(sequence.output) >= 10 for sequence in driver.sequences.values())
    assert_all_match(driver, kind, generate_reference)


@pytest.mark.parametrize("seed", range(3))
def test_random_schedules_with_preemptions_equal_generate(
    seed: int, make_driver: MakeDriver, generate_reference: Generate
) -> None:
    driver = make_driver("llama")
    chance = random.Random(seed)
    for index in range(5):
        driver.add(str(index), random_prompt(chance.choice([1, 7, 8, 9, 40, 150]), seed=index))
    for _ in range(40):
        names = chance.sample(list(driver.sequences), chance.randint(1, 5))
        if chance.random() < 0.2:
            victim = names.pop()
            if driver.sequences[victim].is_known_to_runner:
                driver.preempt(victim)
        driver.step({n: chance.randint(1, driver.sequences[n].lacking) for n in names})
    assert sum(len(sequence.output) for sequence in driver.sequences.values()) > 20
    assert_all_match(driver, "llama", generate_reference)


def test_request_resumes_in_the_step_that_preempts_it(
    make_driver: MakeDriver, generate_reference: Generate
) -> None:
    driver = make_driver()
    driver.add("a", random_prompt(20))
    driver.generate("a", 5)
    driver.preempt("a")
    driver.generate("a", 10)
    assert_all_match(driver, "llama", generate_reference)


def test_rows_share_blocks_filled_in_the_same_step(
    make_driver: MakeDriver, generate_reference: Generate
) -> None:
    driver = make_driver()
    prefix = random_prompt(24)
    driver.add("filler", prefix + random_prompt(5, seed=1))
    driver.add("sharer", prefix + random_prompt(9, seed=2))
    filling = driver.sequences["filler"]
    driver.allocate(filling, filling.lacking)
    driver.share_prefix("sharer", "filler", num_blocks=3)
    driver.step({"sharer": 9, "filler": 29})  # the sharer comes first
    for _ in range(5):
        driver.step()
    assert_all_match(driver, "llama", generate_reference)


def test_step_scheduled_ahead_uses_the_token_sampled_before_it(
    make_driver: MakeDriver, generate_reference: Generate
) -> None:
    driver = make_driver()
    driver.add("a", random_prompt(20))
    driver.add("b", random_prompt(3))
    in_flight = driver.schedule({"a": 20, "b": 3})
    for _ in range(6):
        ahead = driver.schedule({"a": 1, "b": 1})
        driver.execute(in_flight)
        in_flight = ahead
    driver.execute(in_flight)
    assert_all_match(driver, "llama", generate_reference)


def test_request_may_finish_while_a_step_for_it_is_in_flight(
    make_driver: MakeDriver, generate_reference: Generate
) -> None:
    driver = make_driver()
    driver.add("a", random_prompt(20))
    driver.add("b", random_prompt(9))
    driver.step()
    surplus = driver.schedule({"a": 1, "b": 1})
    driver.finish("a")
    driver.execute(surplus)
    driver.add("a2", random_prompt(30))
    for _ in range(5):
        driver.step()
    assert_all_match(driver, "llama", generate_reference)


def test_rows_are_reused_without_traces_of_their_last_request(
    make_driver: MakeDriver, generate_reference: Generate
) -> None:
    driver = make_driver()
    for index in range(20):  # the batch has eight rows
        driver.add(str(index), random_prompt(5 + index))
        driver.generate(str(index), 3)
        assert_all_match(driver, "llama", generate_reference)
        driver.finish(str(index))


def test_unknown_ids_may_leave(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add("a", random_prompt(4))
    driver.finished, driver.preempted = ["ghost"], ["other ghost"]
    assert len(driver.generate("a", 2)) == 2


def test_step_without_tokens_only_drops(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add("a", random_prompt(4))
    driver.generate("a", 2)
    driver.finish("a")
    output = driver.runner.execute_model(driver.schedule({}))
    assert (output.req_ids, output.sampled_token_ids) == ([], [])
    assert len(driver.runner._batch) == 0


def test_other_requests_go_on_after_a_failed_step(
    make_driver: MakeDriver, generate_reference: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver()
    driver.add("sound", random_prompt(20))
    driver.generate("sound", 2)
    driver.add("failing", random_prompt(9))
    with monkeypatch.context() as patch:
        patch.setattr(driver.runner._backend, "prepare", lambda step: 1 / 0)
        assert "ZeroDivisionError" in driver.step({"failing": 9}).failed["failing"]
    # a step that was scheduled ahead carries the failed request once more, and beyond its tokens
    driver.step({"failing": 1, "sound": 1})
    driver.finish("failing")
    driver.generate("sound", 8)
    assert_all_match(driver, "llama", generate_reference)


@pytest.mark.parametrize("stranger", [VOCAB_SIZE, -1])
def test_a_token_that_the_vocabulary_has_not_fails_its_step_alone(
    stranger: int, make_driver: MakeDriver
) -> None:
    alone = make_driver()
    alone.add("a", random_prompt(9))
    expected = alone.generate("a", 6)
    driver = make_driver()
    driver.add("a", random_prompt(9))
    driver.generate("a", 3)
    driver.add("b", [5, stranger, 6])
    result = driver.step({"a": 1, "b": 3})
    assert "IndexError" in result.failed["b"]
    driver.finish("b")
    assert driver.generate("a", 6) == expected


def test_non_finite_values_of_one_request_do_not_reach_the_next_owner_of_its_blocks(
    make_driver: MakeDriver, generate_reference: Generate
) -> None:
    driver = make_driver()
    driver.add("broken", [0] * 30)
    embedding = driver.runner._model.decoder.embedding.table
    with torch.inference_mode():
        healthy = embedding[0].clone()
        embedding[0] = float("nan")
        driver.step()
        embedding[0] = healthy
    driver.finish("broken")
    driver.add("sound", random_prompt(17))
    driver.generate("sound", 6)
    assert_all_match(driver, "llama", generate_reference)


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_half_precision_stays_close_to_float32(half: str, make_driver: MakeDriver) -> None:
    params = SamplingParams(temperature=0, logprobs=5)
    found = []
    for dtype in ("float32", half):
        driver = make_driver("llama", dtype=dtype)
        driver.add("a", random_prompt(90), params)
        driver.step({"a": 50})
        driver.generate("a", 1)
        found.append(driver.sequences["a"].logprobs[0])
    assert found[0].top_token_ids[0] == found[1].top_token_ids[0]
    assert abs(found[0].logprob - found[1].logprob) < 0.25


def test_logprobs_are_given_only_to_those_who_asked(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.add("asks", random_prompt(9), SamplingParams(temperature=0, logprobs=3))
    driver.add("does not", random_prompt(9))
    result = driver.step()
    assert list(result.logprobs) == ["asks"]
    entry = result.logprobs["asks"][0]
    assert entry.rank == 1
    assert entry.top_token_ids[0] == driver.sequences["asks"].output[0]
    assert len(entry.top_logprobs) == 3


def test_penalties_survive_preemption(make_driver: MakeDriver) -> None:
    params = SamplingParams(
        temperature=0, frequency_penalty=2, presence_penalty=2, repetition_penalty=1.5
    )
    outputs = []
    for is_preempted in (False, True):
        driver = make_driver()
        driver.add("a", random_prompt(9), params)
        driver.generate("a", 6)
        if is_preempted:
            driver.preempt("a")
        outputs.append(list(driver.generate("a", 12)))
    assert outputs[0] == outputs[1]


def test_seeded_sampling_does_not_depend_on_schedule_row_or_neighbours(
    make_driver: MakeDriver,
) -> None:
    params = SamplingParams(temperature=2.0, seed=7)
    driver = make_driver()
    driver.add("alone", random_prompt(30), params)
    alone = list(driver.generate("alone", 10))
    for index in range(3):
        driver.add(f"n{index}", random_prompt(20, seed=index), SamplingParams(seed=index))
    driver.add("again", random_prompt(30), params)
    driver.step({"again": 13, "n2": 20})
    driver.step({"n2": 1, "again": 17, "n0": 3})
    while len(driver.sequences["again"].output) < 10:
        driver.step({"n2": 1, "again": 1, "n1": 1} if driver.sequences["n1"].lacking else None)
    assert driver.sequences["again"].output[:10] == alone


def test_blocks_are_in_memory_before_a_step_writes_to_them(
    make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_memory, "AHEAD_TOKENS", 1)
    monkeypatch.setattr(kv_memory, "CHUNK_BYTES", 1)
    driver = make_driver()
    backend, forward = driver.runner._backend, driver.runner._model.forward
    assert not is_resident(backend.key_caches[0], driver.free_blocks)

    def watched(inputs: ModelInputs, attention: LayerAttention) -> torch.Tensor:
        blocks = set((inputs.slots // BLOCK_SIZE).tolist())
        for cache in (*backend.key_caches, *backend.value_caches):
            assert is_resident(cache, blocks)
        return forward(inputs, attention)

    monkeypatch.setattr(driver.runner._model, "forward", watched)
    driver.add("a", random_prompt(30))
    driver.add("b", random_prompt(50))
    for _ in range(20):
        driver.step()


def test_a_prompt_in_chunks_has_all_its_blocks_soon(
    make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_memory, "AHEAD_TOKENS", 1)
    driver = make_driver()
    driver.free_blocks.sort(reverse=True)  # from 0 upwards
    driver.add("a", random_prompt(300))
    driver.allocate(driver.sequences["a"], 300)
    driver.step({"a": 8})
    memory = driver.runner._backend.memory
    memory.close()  # its thread has done what it was asked for
    assert memory.num_committed_blocks >= len(driver.sequences["a"].block_ids) == 38


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "as is"])
def test_tokens_do_not_depend_on_the_number_of_threads(
    fused: bool, make_driver: MakeDriver, generate_reference: Generate
) -> None:
    driver = make_driver("llama", fused=fused)
    driver.add("a", random_prompt(150))
    driver.add("b", random_prompt(40))
    driver.step({"a": 100, "b": 17})
    for turn in range(12):
        torch.set_num_threads(1 + turn % 3)
        driver.step()
    torch.set_num_threads(1)
    assert_all_match(driver, "llama", generate_reference)


@pytest.mark.parametrize("method", ["none", "ngram"])
async def test_steps_that_overwrite_arrays_choose_the_tokens_of_new_ones(
    method: Literal["none", "ngram"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and drawn rows decode together over the ends of several blocks, then one alone."""

    async def reply(engine: AsyncEngine, number: int) -> list[int]:
        length = 80 if number == 3 else 40
        params = SamplingParams(
            max_tokens=length, temperature=number % 2, seed=number, ignore_eos=True
        )
        outputs = [output async for output in engine.generate("Once upon a time", params)]
        return [token for output in outputs for token in output.token_ids]

    async def replies() -> list[list[int]]:
        config = EngineConfig(  # in bfloat16, drafts may change which of two near tokens is chosen
            model=ModelConfig(dtype="float32"),
            speculation=SpeculationConfig(speculative_method=method),
        )
        async with AsyncEngine(config) as engine:
            return await asyncio.gather(*(reply(engine, number) for number in range(4)))

    overwritten = await replies()
    monkeypatch.setattr(executor, "InputBatch", lambda *args, overwrites: InputBatch(*args))
    assert overwritten == await replies()
    assert [len(tokens) for tokens in overwritten] == [40, 40, 40, 80]
