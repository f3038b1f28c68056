"""aioserve's scheduler inside a real vLLM: its tokens are those of vLLM's own scheduler."""

import copy
import inspect
import json
import time
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

import torch
import vllm
from packaging.version import Version
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.interface import SchedulerInterface

from aioserve.errors import ConfigError
from aioserve.outputs import EngineCoreOutputs, ModelRunnerOutput
from aioserve.request import RequestStatus
from aioserve.scheduler import (
    BaseScheduler,
    Request,
    SchedulerOutput,
    available_policies,
    load_policy,
)
from aioserve.vllm import Scheduler
from aioserve.vllm.requests import Arrivals
from aioserve.vllm.settings import read_settings
from tests.vllm.inside import (
    BLOCK_SIZE,
    MODEL,
    TIGHT,
    Asked,
    Served,
    a_load,
    check_equal,
    check_over,
    core_of,
    exchange,
    give_back,
    make_engine,
    serve,
)

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

NGRAMS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
DRAFT_MODEL = {"method": "draft_model", "model": str(MODEL), "num_speculative_tokens": 2}
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 4}
KINDS: dict[str, dict[str, Any]] = {
    "plain": TIGHT,
    "whole": TIGHT | {"max_num_batched_tokens": TIGHT["max_model_len"]},
    "asynchronous": TIGHT | {"asynchronous": True},
    "drafts": TIGHT | {"speculative_config": NGRAMS},
    "draft head": TIGHT | {"speculative_config": {"method": "eagle", "num_speculative_tokens": 2}},
    "draft model": TIGHT | {"speculative_config": DRAFT_MODEL},
    "adapters": TIGHT | LORA | {"num_gpu_blocks_override": 18},
    "adapters or none": TIGHT | LORA | {"max_loras": 4},
    "pooling": {"runner": "pooling", "max_num_batched_tokens": 64},
}


def load_of(kind: str) -> list[Asked]:
    # vLLM's sampler of drafts takes no `top_k` on a CPU, and forbids stop tokens behind drafts by
    # the number of tokens before them: `min_tokens` depends on how many drafts a step had. vLLM
    # ends with an error of its own when prompt logprobs are asked for beside an adapter.
    has_drafts = "draft" in kind
    return a_load(
        60,
        samples=not has_drafts,
        min_tokens=not has_drafts,
        prompt_logprobs="adapters" not in kind,
    )


class Engine:
    """One vLLM, under whichever scheduler a test wants."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, settings = kind, copy.deepcopy(KINDS[kind])
        if kind == "draft head":
            settings["speculative_config"]["model"] = str(write_draft_head(folder))
        self.llm = make_engine(**settings)
        #: Of the requests of a load, in turns.
        self.adapters: list[LoRARequest | None] = [None]
        if "adapters" in kind:
            self.adapters = [write_adapter(folder, number) for number in (1, 2, 3)]
        if kind == "adapters or none":
            self.adapters.append(None)

    @cached_property
    def theirs(self) -> Served:
        """What comes of the load under vLLM's own scheduler."""
        give_back(self.llm)
        return self.serve(load_of(self.kind))

    def serve(self, load: list[Asked]) -> Served:
        """What comes of a load under the scheduler that plans now."""
        return serve(self.llm, load, adapters=self.adapters)


def write_draft_head(folder: Path) -> Path:
    """One layer with random weights behind the hidden states of the small model."""
    config = json.loads((MODEL / "config.json").read_text()) | {"num_hidden_layers": 1}
    size, inner, head = (config[f"{n}"] for n in ("hidden_size", "intermediate_size", "head_dim"))
    shapes = {
        "self_attn.q_proj": (head * config["num_attention_heads"], size),
        "self_attn.k_proj": (head * config["num_key_value_heads"], size),
        "self_attn.v_proj": (head * config["num_key_value_heads"], size),
        "self_attn.o_proj": (size, head * config["num_attention_heads"]),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    dice = torch.Generator().manual_seed(1)
    tensors = {
        f"layers.0.{name}.weight": 0.02 * torch.randn(shape, generator=dice)
        for name, shape in shapes.items()
    }
    tensors["layers.0.post_attention_layernorm.weight"] = torch.ones(size)
    tensors["fc.weight"] = torch.cat((torch.zeros(size, size), torch.eye(size)), 1)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_adapter(path: Path, number: int) -> LoRARequest:
    """Random weights on the queries and values of the small model."""
    config = json.loads((MODEL / "config.json").read_text())
    dice = torch.Generator().manual_seed(number)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in (("q_proj", config["hidden_size"]), ("v_proj", config["head_dim"])):
            to = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            shape = (8, config["hidden_size"])
            tensors[f"{to}.lora_A.weight"] = 0.1 * torch.randn(shape, generator=dice)
            tensors[f"{to}.lora_B.weight"] = 0.1 * torch.randn((size, 8), generator=dice)
    folder = path / str(number)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM"}
    fields |= {"target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return LoRARequest(f"adapter-{number}", number, str(folder))


@pytest.fixture(scope="module")
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    engine = Engine(request.param, tmp_path_factory.mktemp("adapters"))
    yield engine
    core_of(engine.llm).shutdown()


def of(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("engine", kinds, indirect=True)


def generate(llm: LLM, prompts: list[Any], params: list[Any], **fields: Any) -> list[Any]:
    """Of each reply the tokens and why it ended."""
    outputs = llm.generate(prompts, params, use_tqdm=False, **fields)
    return [[(list(c.token_ids), c.finish_reason) for c in o.outputs] for o in outputs]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


def ids(first: int, count: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": list(range(first, first + count))}


class Finished(NamedTuple):
    reason: str | None
    stop_reason: object
    num_tokens: int


def drive(llm: LLM, requests: dict[str, SamplingParams], steps: int = 400) -> dict[str, Finished]:
    """Serve requests of 40 tokens by name; how each has ended."""
    engine, ended = llm.llm_engine, {}
    for i, (name, params) in enumerate(requests.items()):
        engine.add_request(name, ids(5 + 50 * i, 40), params)
    for _ in range(steps):
        if not engine.has_unfinished_requests():
            break
        for output in engine.step():
            if output.finished:
                [c] = output.outputs
                ended[output.request_id] = Finished(
                    c.finish_reason, c.stop_reason, len(c.token_ids)
                )
    return ended


# The same tokens.


@of("plain", "asynchronous", "drafts", "draft head", "draft model", "adapters", "adapters or none")
@pytest.mark.parametrize("policy", ["chunked_prefill", "mlfq", "priority"])
def test_replies_are_those_of_vllms_own_scheduler(engine: Engine, policy: str) -> None:
    """Shared prefixes, salts, chunks, preemptions, aborts, priorities, stop tokens, several
    samples, logprobs of replies and prompts; each step is checked.
    """
    kind, theirs = engine.kind, engine.theirs
    scheduler = exchange(engine.llm, policy=policy, check=True)
    ours = engine.serve(load_of(kind))
    check_equal(ours, theirs)
    check_over(scheduler)
    stats = scheduler.policy.make_stats()
    assert stats.num_preemptions > 0
    assert ours.num_cached > 0
    assert (stats.num_draft_tokens > 0) == ("draft" in kind)
    if kind != "draft head":  # of random weights, no guess need be right
        assert (stats.num_accepted_tokens > 0) == ("draft" in kind)
    assert scheduler.settings.scheduler.depth == (2 if kind == "asynchronous" else 1)


@of("draft head")
def test_a_draft_head_computes_the_last_cached_block_anew(engine: Engine) -> None:
    found = []
    for begin in (give_back, exchange):
        begin(engine.llm)
        for _ in range(2):
            [output] = engine.llm.generate([ids(5, 100)], [greedy(4)], use_tqdm=False)
            found.append(output.num_cached_tokens)
    assert found == [0, 2 * BLOCK_SIZE] * 2


@of("plain")
def test_equal_prompts_of_one_step_share_their_blocks(engine: Engine) -> None:
    """vLLM's attention writes the keys and values of all rows before any row attends."""
    give_back(engine.llm)
    alone = generate(engine.llm, [ids(5, 90)], [greedy(8)])
    exchange(engine.llm, check=True)
    outputs = engine.llm.generate([ids(5, 90)] * 2, [greedy(8)] * 2, use_tqdm=False)
    assert [list(o.outputs[0].token_ids) for o in outputs] == [alone[0][0][0]] * 2
    assert [o.num_cached_tokens for o in outputs] == [0, 90 // BLOCK_SIZE * BLOCK_SIZE]


@of("plain", "asynchronous", "drafts")
def test_structured_outputs_keep_to_their_grammars(engine: Engine) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    wanted = [
        StructuredOutputsParams(json=json.dumps(schema)),
        StructuredOutputsParams(choice=["yes", "no", "perhaps"]),
        StructuredOutputsParams(regex="[a-c]{3,9}x"),
        None,
    ]
    params = [
        SamplingParams(temperature=0.0, max_tokens=30, structured_outputs=each) for each in wanted
    ]
    prompts = ["The duke of York and all of his men", "The duke", "A", "Once upon a time"]
    scheduler = exchange(engine.llm, check=True)
    ours = generate(engine.llm, prompts * 2, params * 2)
    check_over(scheduler)
    tokenizer = engine.llm.get_tokenizer()
    texts = [tokenizer.decode(reply[0][0], skip_special_tokens=True) for reply in ours]
    assert texts[:4] == texts[4:]
    assert texts[0].startswith("{")
    assert texts[1] in ("yes", "no", "perhaps")
    assert set(texts[2]) <= set("abcx")
    assert texts[2].endswith("x")


@of("adapters", "adapters or none")
def test_adapters_share_steps_and_no_blocks(engine: Engine) -> None:
    adapters, count = engine.adapters, len(engine.adapters)
    give_back(engine.llm)
    alone = [generate(engine.llm, [ids(5, 90)], [greedy(10)], lora_request=[a]) for a in adapters]
    scheduler = exchange(engine.llm, policy="fair", check=True)
    prompts, params = [ids(5, 90)] * (2 * count), [greedy(10)] * (2 * count)
    ours = generate(engine.llm, prompts, params, lora_request=adapters * 2)
    assert ours == [reply for [reply] in alone] * 2
    assert len({str(reply) for reply in alone}) == count
    check_over(scheduler)


@of("adapters")
def test_vllm_for_cpus_gives_rows_without_adapter_the_last_one(engine: Engine) -> None:
    """Its own scheduler as well: mended there, the warning of `Scheduler` and this can go."""
    give_back(engine.llm)
    [alone] = generate(engine.llm, [ids(5, 90)], [greedy(10)])
    adapters = [None, *engine.adapters[:2]]
    beside, *_ = generate(engine.llm, [ids(5, 90)] * 3, [greedy(10)] * 3, lora_request=adapters)
    assert beside != alone


@of("adapters")
def test_the_name_of_an_adapter_is_the_user_unless_one_is_stated(engine: Engine) -> None:
    exchange(engine.llm, policy=f"{HERE}:Sees")
    [_, adapter, _] = engine.adapters
    params = [greedy(2), SamplingParams(max_tokens=2, extra_args={"user": "alice"})]
    Sees.seen.clear()
    generate(engine.llm, [ids(5, 40)] * 2, params, lora_request=[adapter] * 2)
    seen = type(core_of(engine.llm).scheduler.policy).seen.values()
    assert [(each.user, each.adapter_id) for each in seen] == [
        ("adapter-2", "adapter-2@2"),
        ("alice", "adapter-2@2"),
    ]


@of("pooling")
def test_pooled_prompts_have_vllms_own_vectors(engine: Engine) -> None:
    prompts = [ids(5, count) for count in (3, 50, 100, 100)]

    def vectors() -> list[Any]:
        outputs = engine.llm.encode(prompts, pooling_task="embed", use_tqdm=False)
        return [output.outputs.data for output in outputs]

    give_back(engine.llm)
    theirs = vectors()
    scheduler = exchange(engine.llm, check=True)
    for one, other in zip(vectors(), theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    check_over(scheduler)


# What operators do.


@of("plain", "asynchronous")
def test_a_pause_that_empties_the_cache_changes_no_reply(engine: Engine) -> None:
    core, llm_engine = core_of(engine.llm), engine.llm.llm_engine
    exchange(engine.llm)
    expected = generate(engine.llm, [ids(5, 60), ids(70, 60)], [greedy(20)] * 2)
    scheduler = exchange(engine.llm, check=True)
    llm_engine.add_request("a", ids(5, 60), greedy(20))
    for _ in range(8):
        llm_engine.step()
    scheduler.set_pause_state(type(scheduler.pause_state).PAUSED_ALL)
    while core.batch_queue:
        llm_engine.step()
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    llm_engine.add_request("b", ids(70, 60), greedy(20))
    assert not scheduler.has_requests()
    assert scheduler.get_request_counts() == (0, 2)
    core.resume_scheduler()
    ended = {}
    while llm_engine.has_unfinished_requests():
        for output in llm_engine.step():
            ended[output.request_id] = list(output.outputs[0].token_ids)
    assert [ended["a"], ended["b"]] == [reply[0][0] for reply in expected]
    check_over(scheduler)


@of("plain")
def test_a_request_that_slept_goes_on_or_is_told_of_its_end(engine: Engine) -> None:
    """vLLM empties the caches and stops; on a CPU its weights stay where they are."""
    llm_engine = engine.llm.llm_engine
    exchange(engine.llm)
    expected = generate(engine.llm, [ids(5, 60)], [greedy(20)])
    scheduler = exchange(engine.llm, check=True)
    llm_engine.add_request("kept", ids(5, 60), greedy(20))
    for _ in range(8):
        llm_engine.step()
    engine.llm.sleep(level=1, mode="keep")
    assert not scheduler.has_requests()
    assert scheduler.get_kv_cache_usage() == 0.0
    engine.llm.wake_up()
    ended = []
    while llm_engine.has_unfinished_requests():
        ended += [output for output in llm_engine.step() if output.finished]
    assert [list(output.outputs[0].token_ids) for output in ended] == [expected[0][0][0]]
    llm_engine.add_request("dropped", ids(5, 60), greedy(20))
    llm_engine.step()
    engine.llm.sleep(level=1, mode="abort")
    assert scheduler.get_request_counts() == (0, 0)
    llm_engine.abort_request(["dropped"])  # what its front end keeps of it
    engine.llm.wake_up()
    assert generate(engine.llm, [ids(5, 60)], [greedy(20)]) == expected
    check_over(scheduler)


@of("plain")
def test_a_pause_for_new_requests_lets_running_ones_end(engine: Engine) -> None:
    llm_engine = engine.llm.llm_engine
    scheduler = exchange(engine.llm, check=True)
    llm_engine.add_request("a", ids(5, 60), greedy(6))
    llm_engine.step()
    scheduler.set_pause_state(type(scheduler.pause_state).PAUSED_NEW)
    llm_engine.add_request("b", ids(70, 60), greedy(6))
    ended = []
    while scheduler.has_requests():
        ended += [output.request_id for output in llm_engine.step() if output.finished]
    assert ended == ["a"]
    assert scheduler.get_request_counts() == (0, 1)
    scheduler.set_pause_state(type(scheduler.pause_state).UNPAUSED)
    while llm_engine.has_unfinished_requests():
        ended += [output.request_id for output in llm_engine.step() if output.finished]
    assert ended == ["a", "b"]
    check_over(scheduler)


@of("plain", "asynchronous")
def test_a_policy_that_takes_over_changes_no_reply(engine: Engine) -> None:
    """In the middle of a load, and twice; a pause for new requests holds under the next one."""
    scheduler = exchange(engine.llm, policy="chunked_prefill", check=True)
    states = type(scheduler.pause_state)

    def change(num_steps: int) -> None:
        if num_steps == 10:
            scheduler.switch("priority")
        elif num_steps == 20:
            scheduler.set_pause_state(states.PAUSED_NEW)
            scheduler.switch("fair", {"quantum": 64})
            assert scheduler.policy.max_num_seqs == 0
        elif num_steps == 22:
            scheduler.set_pause_state(states.UNPAUSED)

    ours = serve(engine.llm, load_of(engine.kind), each_step=change)
    check_equal(ours, engine.theirs)
    check_over(scheduler)
    assert type(scheduler.policy).__name__ == "FairScheduler"
    with pytest.raises(ConfigError, match="no_such"):
        scheduler.switch("fair", {"no_such": 1})
    assert type(scheduler.policy).__name__ == "FairScheduler"


def test_arrival_times_keep_their_order_however_late_they_are_read() -> None:
    """vLLM's requests have times of the day; two clocks are never read for each."""
    times = iter([100.0, *[200.0 + 0.001 * i for i in range(50)]])
    arrivals = Arrivals(lambda: next(times))
    began = time.time()
    found = [arrivals(began + 1e-6 * i) for i in range(40)]
    assert found == sorted(found)
    assert len(set(found)) == 40


# What policies see, and what becomes of those that fail.


class Sees(BaseScheduler):
    """Order of arrival; keeps what it saw of each request."""

    seen: ClassVar[dict[str, Request]] = {}

    def order(self, request: Request) -> float:
        self.seen[request.request_id.partition("-")[0]] = request
        return request.arrival_time

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in step.run_decodes():
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()


class Raises(Sees):
    def schedule(self) -> SchedulerOutput:
        if self.num_steps > 3:
            raise ValueError("planted")
        return super().schedule()


class RaisesInUpdate(Sees):
    """A policy whose `update_from_output()` raises for every step."""

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        raise ValueError("planted")


class Loops(Sees):
    def schedule(self) -> SchedulerOutput:
        if self.num_steps > 3:
            while True:
                pass
        return super().schedule()


class LoopsInOrder(Sees):
    """From the third request on."""

    def order(self, request: Request) -> float:
        while self.seen_by_itself >= 2:
            pass
        self.seen_by_itself += 1
        return super().order(request)

    seen_by_itself = 0


class HalvesTokens(Sees):
    """Gives each prompt a share of the budget, and forgets to round it."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in step.run_decodes():
            step.run(request)
        for request in list(self.waiting)[:1]:
            step.admit(request, 15 / 2)  # type: ignore[arg-type]
        return step.output()


class Nonsense(Sees):
    def schedule(self) -> SchedulerOutput:
        return super().schedule() if self.num_steps <= 3 else None  # type: ignore[return-value]


class Sleeps(Sees):
    """Holds everything back for a while; counts how often it was asked."""

    num_asked = 0

    def schedule(self) -> SchedulerOutput:
        self.num_asked += 1
        if self.num_asked == 1:
            self.until = self.clock() + 0.5
        if self.clock() < self.until:
            step = self.new_step()
            self.wake_at(self.until)
            return step.output()
        return super().schedule()


class Turns(Sees):
    """Rejects what says so, holds back what says so."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in step.run_decodes():
            step.run(request)
        for request in self.waiting:
            if request.user == "unwanted":
                step.reject(request, "not today", retry_after=3.0)
            elif request.user != "held":
                step.admit(request)
        return step.output()


class SetsTheClock(Sees):
    """Asks for a card whose clock it can set."""

    sets_frequency = True


class WantsEntropies(Sees):
    """Asks for a value of each row of logits."""

    wants_row_values = ("entropy",)


class EndsByItself(Sees):
    """Raises where vLLM's engine core ends requests."""

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[str]:
        raise ValueError("planted")


class IsNeverDone(Sees):
    """Raises where vLLM's engine core asks whether there is anything to do."""

    def has_requests(self) -> bool:
        raise ValueError("planted")


HERE = f"{Path(__file__)}"


@of("plain")
def test_hints_reach_the_policy(engine: Engine) -> None:
    exchange(engine.llm, policy=f"{HERE}:Sees")
    extra = {"user": "alice", "slo_class": "gold", "osl": 7, "urgent": True, "deadline": 60.0}
    extra["kv_transfer_params"] = {"x": 1}
    params = SamplingParams(temperature=0.0, max_tokens=3, extra_args={**extra, "Other": [1]})
    engine.llm.llm_engine.add_request("a", ids(5, 40), params, priority=-2)
    while engine.llm.llm_engine.has_unfinished_requests():
        engine.llm.llm_engine.step()
    policy = core_of(engine.llm).scheduler.policy
    [seen] = [each for name, each in type(policy).seen.items() if name.startswith("a")]
    assert seen.priority == -2
    assert seen.user == "alice"
    assert seen.hints == {"slo_class": "gold", "predicted_output_tokens": 7, "urgent": True}
    assert seen.deadline == pytest.approx(seen.arrival_time + 60.0)
    assert 0.0 <= policy.clock() - seen.arrival_time < 600.0


@of("plain", "asynchronous")
def test_a_client_keeps_a_prefix_for_as_long_as_it_asks(engine: Engine) -> None:
    scheduler = exchange(engine.llm, policy="fair", check=True)
    leases = scheduler.policy.kv_cache.leases
    kept, dropped = ids(5, 3 * BLOCK_SIZE), ids(405, 3 * BLOCK_SIZE)
    asks = SamplingParams(temperature=0.0, max_tokens=3, extra_args={"cache_seconds": 60})
    generate(engine.llm, [kept, dropped], [asks, greedy(3)])
    for number in range(4):  # more than all KV blocks together
        generate(engine.llm, [ids(505 + 300 * number, 300)], [greedy(3)])
    again = engine.llm.generate([kept, dropped], [greedy(3)] * 2, use_tqdm=False)
    assert [each.num_cached_tokens for each in again] == [2 * BLOCK_SIZE, 0]
    assert len(leases) == 1
    assert scheduler.get_kv_cache_usage() == pytest.approx(3 / scheduler.settings.num_blocks)
    assert scheduler.reset_prefix_cache()
    assert len(leases) == 0
    check_over(scheduler)


@of("plain")
def test_the_lease_of_a_client_ends_with_its_time(engine: Engine) -> None:
    scheduler = exchange(engine.llm, policy="fair", check=True)
    leases = scheduler.policy.kv_cache.leases
    asks = SamplingParams(temperature=0.0, max_tokens=3, extra_args={"cache_seconds": 0.2})
    generate(engine.llm, [ids(5, 3 * BLOCK_SIZE)], [asks])
    generate(engine.llm, [ids(5, 40)], [greedy(1)])  # the step that makes the lease
    made = leases.next_due(None)
    assert made is not None
    time.sleep(max(made - scheduler.policy.clock(), 0.0))
    generate(engine.llm, [ids(5, 40)], [greedy(1)])
    assert len(leases) == 0
    check_over(scheduler)


@of("plain", "asynchronous")
@pytest.mark.parametrize(
    "policy", ["Raises", "RaisesInUpdate", "Loops", "LoopsInOrder", "HalvesTokens", "Nonsense"]
)
def test_a_policy_that_fails_is_replaced_and_vllm_goes_on(engine: Engine, policy: str) -> None:
    scheduler = exchange(
        engine.llm, policy=f"{HERE}:{policy}", check=True, stall_timeout=PATIENCE_OF_LOOPS
    )
    ended = drive(engine.llm, {f"r{i}": greedy(12) for i in range(4)})
    assert len(ended) == 4
    assert scheduler.failures.count >= 2
    assert type(scheduler.policy).__name__ == "FallbackScheduler"
    assert {each.reason for each in ended.values()} <= {"error", "length"}
    assert [each.reason for each in drive(engine.llm, {"later": greedy(5)}).values()] == ["length"]
    assert scheduler.checks is not None
    assert scheduler.checks.violation is None
    assert scheduler.get_kv_cache_usage() == 0.0


@of("plain")
def test_a_policy_replaced_in_a_pause_starts_no_new_request(engine: Engine) -> None:
    llm_engine = engine.llm.llm_engine
    scheduler = exchange(engine.llm, policy=f"{HERE}:Raises", check=True)
    for number in range(2):  # as many as one step has tokens for
        llm_engine.add_request(f"old {number}", ids(5 + 50 * number, 40), greedy(12))
    llm_engine.step()
    scheduler.set_pause_state(type(scheduler.pause_state).PAUSED_NEW)
    llm_engine.add_request("new", ids(300, 40), greedy(5))
    ended: dict[str, str | None] = {}

    def serve_all() -> None:
        while scheduler.has_requests():
            for output in llm_engine.step():
                ended[output.request_id] = output.outputs[0].finish_reason

    serve_all()
    assert type(scheduler.policy).__name__ == "FallbackScheduler"
    assert len(ended) == 2
    assert "new" not in ended
    assert scheduler.get_request_counts() == (0, 1)
    scheduler.set_pause_state(type(scheduler.pause_state).UNPAUSED)
    serve_all()
    assert ended["new"] == "length"
    assert scheduler.get_request_counts() == (0, 0)
    assert scheduler.get_kv_cache_usage() == 0.0


#: Seconds after which a call of a policy counts as one that does not come back.
PATIENCE_OF_LOOPS = 2.0


@of("plain")
def test_a_policy_that_sleeps_is_asked_when_it_wakes(engine: Engine) -> None:
    """vLLM's engine core asks its scheduler every millisecond."""
    scheduler = exchange(engine.llm, policy=f"{HERE}:Sleeps", check=True)
    assert drive(engine.llm, {"a": greedy(1)}, steps=10_000_000)["a"].reason == "length"
    assert scheduler.policy.num_asked == 2
    check_over(scheduler)


@of("plain")
def test_rejected_and_late_requests_are_told_why(engine: Engine) -> None:
    scheduler = exchange(engine.llm, policy=f"{HERE}:Turns", check=True)
    by_user = {
        name: SamplingParams(temperature=0.0, max_tokens=4, extra_args=extra)
        for name, extra in {
            "wanted": {"user": "wanted"},
            "unwanted": {"user": "unwanted"},
            "late": {"user": "held", "deadline": 0.05},
            "wrong": {"deadline": -1},
        }.items()
    }
    ended = drive(engine.llm, by_user, steps=100_000)
    assert ended["wanted"].reason == "length"
    assert ended["unwanted"] == Finished("abort", "rejected: not today (ask again in 3 s)", 0)
    assert ended["late"] == Finished("abort", "timeout", 0)
    assert ended["wrong"].reason == "abort"
    assert "deadline must be seconds above 0" in str(ended["wrong"].stop_reason)
    check_over(scheduler)


POLICIES = sorted(set(available_policies()) - {"vllm"})


def saying(name: str) -> set[str]:
    """The policies whose class sets this attribute."""
    return {policy for policy in POLICIES if getattr(load_policy(policy), name, False)}


WHOLE, CLOCKS = saying("runs_whole_prompts"), saying("sets_frequency")  # those are refused


# Two tests, since an engine is made anew for each policy where both are one parameter.


@of("plain")
@pytest.mark.parametrize("policy", sorted(set(POLICIES) - WHOLE - CLOCKS))
def test_every_policy_serves_a_load_by_the_rules(engine: Engine, policy: str) -> None:
    check_policy(engine, policy)


@of("whole")
@pytest.mark.parametrize("policy", sorted(WHOLE))
def test_every_policy_of_whole_prompts_serves_a_load_by_the_rules(
    engine: Engine, policy: str
) -> None:
    check_policy(engine, policy)


def check_policy(engine: Engine, policy: str) -> None:
    options = {"composed": {"order": "arrival"}}.get(policy, {})
    scheduler = exchange(engine.llm, policy=policy, options=options, check=True)
    served = engine.serve(a_load(200, seed=2, samples=False, longest=12))
    check_over(scheduler)
    assert len(served.replies) > 150


# What is refused, and which vLLM this is.


@of("plain")
@pytest.mark.parametrize(
    ("place", "value", "name"),
    [
        ("scheduler_config.enable_chunked_prefill", False, "--no-enable-chunked-prefill"),
        ("parallel_config.data_parallel_size", 2, "--data-parallel-size"),
        ("parallel_config.pipeline_parallel_size", 2, "--pipeline-parallel-size"),
        ("scheduler_config.long_prefill_token_threshold_adaptive", True, "-threshold-adaptive"),
        ("additional_config", {"aioserve": {"max_num_seqs": 3}}, "--max-num-seqs decides"),
        ("additional_config", {"aioserve": {"request_log": "x"}}, "request_log"),
        ("additional_config", {"aioserve": {"polcy": "fair"}}, "polcy"),
        ("additional_config", {"aioserve": {"check": 1}}, "check"),
        ("additional_config", {"aioserve": {"config": 3}}, "must be the path of a YAML file"),
        ("additional_config", {"policy": "fair"}, "reads it under"),
        ("additional_config", {"aioserv": {"policy": "fair"}}, "are read under 'aioserve'"),
    ],
)
def test_what_is_not_translated_is_refused_by_name(
    engine: Engine, place: str, value: Any, name: str
) -> None:
    exchange(engine.llm)
    config = copy.deepcopy(engine.llm.llm_engine.vllm_config)
    *owner, field = place.split(".")
    object.__setattr__(getattr(config, owner[0]) if owner else config, field, value)
    with pytest.raises(ConfigError, match=name):
        read_settings(config, engine.llm.kv_cache_config, BLOCK_SIZE)


@of("plain")
@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("SetsTheClock", r"policy SetsTheClock sets the card's clock .* no effect inside vLLM"),
        ("WantsEntropies", r"policy WantsEntropies wants row values \(entropy\), which vLLM's"),
        ("EndsByItself", r"policy EndsByItself overrides finish_requests\(\), which vLLM's engine"),
        ("IsNeverDone", r"policy IsNeverDone overrides has_requests\(\), which vLLM's engine core"),
    ],
)
def test_a_policy_that_cannot_serve_inside_vllm_is_refused(
    engine: Engine, policy: str, words: str
) -> None:
    """At the start, and when it is to take over; the one that plans then goes on."""
    with pytest.raises(ConfigError, match=words):
        exchange(engine.llm, policy=f"{HERE}:{policy}")
    scheduler = exchange(engine.llm, policy="fair", check=True)
    with pytest.raises(ConfigError, match=words):
        scheduler.switch(f"{HERE}:{policy}")
    assert type(scheduler.policy).__name__ == "FairScheduler"
    assert drive(engine.llm, {"a": greedy(3)})["a"].reason == "length"
    check_over(scheduler)


@of("plain")
def test_several_kv_cache_groups_are_refused(engine: Engine) -> None:
    exchange(engine.llm)
    kv_cache = copy.copy(engine.llm.kv_cache_config)
    kv_cache.kv_cache_groups = kv_cache.kv_cache_groups * 2
    with pytest.raises(ConfigError, match="2 KV cache groups"):
        read_settings(engine.llm.llm_engine.vllm_config, kv_cache, BLOCK_SIZE)


@of("plain")
def test_settings_come_from_a_file(engine: Engine, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("scheduler:\n  policy: fair\n  victim: newest\n")
    scheduler = exchange(engine.llm, config=str(file), victim="least_lost")
    assert type(scheduler.policy).__name__ == "FairScheduler"
    assert scheduler.settings.scheduler.victim == "least_lost"
    assert scheduler.settings.scheduler.max_num_seqs == TIGHT["max_num_seqs"]


@of("plain")
def test_a_file_says_by_like_how_vllm_preempts(engine: Engine, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("like: vllm\nscheduler: {policy: fair}\n")
    config = exchange(engine.llm, config=str(file)).settings.scheduler
    assert (config.victim, config.admit_beside_preemption) == ("last_admitted", False)


@of("plain")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("scheduler: fair", "scheduler: expected a mapping, got 'fair'"),
        ("scheduler: [fair]", r"scheduler: expected a mapping, got \['fair'\]"),
        (
            "schedulr: {policy: fair}",
            "Object contains unknown field `schedulr` .did you mean 'scheduler'",
        ),
        (
            "scheduler: {polcy: fair}",
            "Object contains unknown field `polcy` - at .* .did you mean 'policy'",
        ),
        ("like: sglang", "like must be one of vllm"),
    ],
)
def test_a_file_of_settings_is_refused_as_by_aioserves_own_server(
    engine: Engine, tmp_path: Path, text: str, words: str
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"serve.yaml:? {words}"):
        exchange(engine.llm, config=str(file))


#: The members of vLLM's `SchedulerInterface`, with what they take, that aioserve was written for.
MEMBERS = {
    "add_request": "request",
    "finish_requests": "request_ids, finished_status",
    "get_ec_connector": "",
    "get_grammar_bitmask": "scheduler_output",
    "get_kv_cache_usage": "",
    "get_kv_connector": "",
    "get_kv_event_publisher_config": "",
    "get_num_unfinished_requests": "",
    "get_request_counts": "",
    "has_finished_requests": "",
    "has_requests": "",
    "has_unfinished_requests": "",
    "make_stats": "",
    "reset_encoder_cache": "",
    "reset_prefix_cache": "reset_running_requests, reset_connector",
    "schedule": "throttle_prefills",
    "set_pause_state": "pause_state",
    "shutdown": "",
    "update_draft_token_ids": "draft_token_ids",
    "update_draft_token_ids_in_output": "draft_token_ids, scheduler_output",
    "update_from_output": "scheduler_output, model_runner_output",
    "__init__": (
        "vllm_config, kv_cache_config, structured_output_manager, block_size, hash_block_size, "
        "mm_registry, include_finished_set, log_stats"
    ),
}


#: Those that came with a version of vLLM's.
SINCE = {"0.33": {"has_request": "request_id"}}


def _told(members: dict[str, str], name: str) -> str:
    return f"({members[name]})" if name in members else "none"


def test_vllms_interface_has_the_members_that_are_implemented() -> None:
    """With a newer vLLM, this says in one line which member moved."""
    known = dict(MEMBERS)
    for version, members in SINCE.items():
        if Version(vllm.__version__) >= Version(version):
            known |= members
    found = {
        name: ", ".join(list(inspect.signature(member).parameters)[1:])
        for name, member in vars(SchedulerInterface).items()
        if inspect.isfunction(member)
    }
    moved = [
        f"{name}: {_told(known, name)} -> {_told(found, name)}"
        for name in sorted(known.keys() | found.keys())
        if known.get(name) != found.get(name)
    ]
    assert not moved, f"vLLM {vllm.__version__} moved " + "; ".join(moved)
    assert not Scheduler.__abstractmethods__
