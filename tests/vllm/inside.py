"""A real vLLM on a small model in this process, whose scheduler tests exchange for aioserve's.

Both schedulers drive one and the same engine core and runner, one after the other, so that what
differs is the scheduler. Prompts share prefixes, some clients leave, and the KV cache is small.
"""

import contextlib
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    HF_HUB_OFFLINE="1",
    TORCH_COMPILE_DISABLE="1",  # it takes longer than what is compiled
    VLLM_CACHE_ROOT=str(Path.home() / ".cache/vllm"),  # what it knows of model classes
)

if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    # vLLM's second model runner needs a Triton that compiles for CPUs. There is none on the package
    # index: Triton's interpreter runs its kernels, and vLLM is told of a backend.
    os.environ.update(TRITON_INTERPRET="1", TRITON_DEFAULT_BACKEND="cpu")
    from triton.backends import backends

    class NoDevice:
        """A driver that says it is there: an interpreted kernel is never compiled."""

        @staticmethod
        def is_active() -> bool:
            return True

    backends["cpu"] = SimpleNamespace(driver=NoDevice, compiler=None)

import torch
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

from aioserve.vllm import Scheduler

MODEL = Path(__file__).parents[2] / "aioserve/model_source/embedded"
BLOCK_SIZE = 32  # the least that vLLM's attention on a CPU takes

#: A pool in which requests are preempted, and steps in which prompts are split.
TIGHT = {
    "num_gpu_blocks_override": 28,
    "max_num_batched_tokens": 96,
    "max_num_seqs": 12,
    "max_model_len": 384,
}


class Asked(NamedTuple):
    """One request of a client."""

    prompt: list[int]
    params: dict[str, Any]
    fields: dict[str, Any]


class Served(NamedTuple):
    """What came of a run."""

    replies: dict[str, list[Any]]  # by request: of each sample tokens, reasons, logprobs
    num_steps: int
    num_cached: int  # prompt tokens that were found in the cache


def make_engine(*, asynchronous: bool = False, **settings: Any) -> LLM:
    """vLLM with its own scheduler. On a CPU it plans no step ahead by itself: `asynchronous` makes
    it, as on a card.
    """
    given = {
        "model": str(MODEL),
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK_SIZE,
        "max_model_len": 512,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "disable_log_stats": False,
        "async_scheduling": False,
        **settings,
    }
    with (
        _without_llvmlites_library(),
        _as_on_a_card() if asynchronous else contextlib.nullcontext(),
    ):
        return LLM(**given)


@contextlib.contextmanager
def _without_llvmlites_library() -> Iterator[None]:
    """vLLM 0.32 looks through the values of all loaded modules and takes `__dict__` for a mapping.
    That of llvmlite's library, which numba loads for n-gram drafts, is a function: a process that
    had such an engine could not make another one with drafts.
    """
    name = "llvmlite.binding.ffi"
    hidden = sys.modules.pop(name, None)
    try:
        yield
    finally:
        if hidden is not None:
            sys.modules[name] = hidden


@contextlib.contextmanager
def _as_on_a_card() -> Iterator[None]:
    """vLLM's runner copies its results on a stream of the device, of which a CPU has none; its
    platform then turns asynchronous scheduling off.
    """

    class Nothing:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.device = torch.device("cpu")

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: None

    cuda: Any = torch.cuda
    cuda.Event = cuda.Stream = Nothing
    cuda.current_stream = lambda *args: Nothing()
    cuda.stream = lambda stream: contextlib.nullcontext()
    whole: Any = torch
    whole.Event = Nothing
    platform = type(current_platform)
    before = platform.check_and_update_config

    def update(cls: Any, config: Any) -> None:
        before(config)
        config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = classmethod(update)
    try:
        yield
    finally:
        platform.check_and_update_config = before


def core_of(llm: LLM) -> Any:
    """vLLM's engine core, in this process."""
    return llm.llm_engine.engine_core.engine_core


def exchange(llm: LLM, kind: Any = Scheduler, **settings: Any) -> Any:
    """Let aioserve's scheduler plan from now on, with these settings under `aioserve`; or another
    `kind` of scheduler, such as `Recorder`.
    """
    core = core_of(llm)
    while core.batch_queue:
        core.step_fn()
    config = llm.llm_engine.vllm_config
    config.additional_config = {"aioserve": settings}
    if not hasattr(llm, "own_scheduler"):
        llm.own_scheduler = core.scheduler
        llm.kv_cache_config = core.scheduler.kv_cache_config
    core.scheduler = kind(
        vllm_config=config,
        kv_cache_config=llm.kv_cache_config,
        structured_output_manager=core.structured_output_manager,
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        log_stats=True,
    )
    return core.scheduler


def give_back(llm: LLM) -> None:
    """Let vLLM's own scheduler plan again: of its cached blocks nothing is there any more."""
    core = core_of(llm)
    while core.batch_queue:
        core.step_fn()
    if hasattr(llm, "own_scheduler"):
        core.scheduler = llm.own_scheduler
        assert core.scheduler.reset_prefix_cache()


def a_load(
    count: int,
    seed: int = 0,
    *,
    samples: bool = True,
    prompt_logprobs: bool = True,
    min_tokens: bool = True,
    longest: int = 60,
) -> list[Asked]:
    """Prompts of 1 to 220 tokens, most behind one of four prefixes; of every kind some requests.
    Replies have fewer than `longest` tokens.
    """
    dice = random.Random(seed)
    prefixes = [[dice.randrange(5, 2000) for _ in range(n)] for n in (32, 64, 64, 100)]
    load = []
    for i in range(count):
        prompt = list(dice.choice(prefixes)) if dice.random() < 0.7 else []
        prompt += [dice.randrange(5, 2000) for _ in range(dice.randrange(1, 120))]
        params: dict[str, Any] = {"temperature": 0.0, "max_tokens": dice.randrange(1, longest)}
        kind = dice.random()
        if kind < 0.15 and samples:  # vLLM takes no greedy samples: these are, by `top_k`
            params |= {"n": 3, "temperature": 0.5, "top_k": 1}
        elif kind < 0.25:
            params |= {"stop_token_ids": [15, 17]}
            if min_tokens:
                params["min_tokens"] = min(4, params["max_tokens"])
        elif kind < 0.32:
            params |= {"logprobs": 2}
        elif kind < 0.38 and prompt_logprobs:
            params |= {"prompt_logprobs": 1}
        elif kind < 0.45:
            params |= {"ignore_eos": True}
        prompt_fields = {"cache_salt": "salted"} if i % 9 == 0 else {}
        load.append(Asked(prompt, params, prompt_fields))
    return load


def serve(
    llm: LLM,
    load: list[Asked],
    *,
    aborts: bool = True,
    adapters: Sequence[Any] = (None,),
    each_step: Callable[[int], None] = lambda num_steps: None,
) -> Served:
    """A few requests come in each step, with these adapters in turns; in some steps a client
    leaves. `each_step` is told the number of steps so far.
    """
    engine, dice = llm.llm_engine, random.Random(1)
    replies: dict[str, list[Any]] = {}
    num_sent = num_steps = num_cached = 0
    while num_sent < len(load) or engine.has_unfinished_requests():
        for _ in range(dice.randrange(6)):
            if num_sent < len(load):
                asked = load[num_sent]
                prompt = {"prompt_token_ids": asked.prompt, **asked.fields}
                params = SamplingParams(**asked.params)
                engine.add_request(
                    str(num_sent),
                    prompt,
                    params,
                    priority=num_sent % 3,
                    lora_request=adapters[num_sent % len(adapters)],
                )
                num_sent += 1
        if aborts and num_steps % 7 == 3 and num_sent:
            engine.abort_request([str(dice.randrange(num_sent))])
        for output in engine.step():
            if output.finished:
                replies[output.request_id] = _told(output)
                num_cached += output.num_cached_tokens or 0
        num_steps += 1
        each_step(num_steps)
        assert num_steps < 200 * len(load), f"{len(replies)} of {len(load)} have ended"
    return Served(replies, num_steps, num_cached)


def _told(output: Any) -> list[Any]:
    told: list[Any] = [
        (list(c.token_ids), c.finish_reason, c.stop_reason, _plain(c.logprobs))
        for c in output.outputs
    ]
    return [*told, _plain(output.prompt_logprobs)]


def _plain(logprobs: Any) -> Any:
    """Return the logprobs of each place, by token."""
    if logprobs is None:
        return None
    return [
        entry and {token: each.logprob for token, each in sorted(entry.items())}
        for entry in logprobs
    ]


def check_over(scheduler: Scheduler) -> None:
    """Nothing remains of what was served, and no rule of the contract was broken."""
    policy = scheduler.policy
    assert scheduler.get_request_counts() == (0, 0)
    assert scheduler.get_kv_cache_usage() == 0.0
    assert policy.get_num_unfinished_requests() == 0
    assert scheduler.failures.count == 0, scheduler.failures.first
    if scheduler.checks is not None and scheduler.checks.violation is not None:
        raise scheduler.checks.violation


def check_equal(ours: Served, theirs: Served) -> None:
    """Each request that ended under both got the same; aborts may catch another step."""
    both = ours.replies.keys() & theirs.replies.keys()
    assert len(both) > 0.8 * len(theirs.replies)
    pairs = {n: (ours.replies[n], theirs.replies[n]) for n in both}
    assert {n: pair for n, pair in pairs.items() if not _are_equal(*pair)} == {}


def _are_equal(one: Any, other: Any) -> bool:
    """Logprobs to a hundredth: sums over a batch of another size differ in their last digits."""
    if isinstance(one, float) and isinstance(other, float):
        return one == other or abs(one - other) < 0.01
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    return bool(one == other)
