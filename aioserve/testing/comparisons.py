"""Rules that need a second run of the same calls: the same plans, without foresight or memory.

Knows calls and plans, and says in words what differs between two plans, the field that tells most
first. Last, runs in processes of their own, in which sets of strings have other orders.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from inspect import getmodule
from itertools import zip_longest
from typing import Any, NamedTuple

from aioserve.errors import EngineOverloadedError
from aioserve.kv_cache import KVCacheManager
from aioserve.lab.simulation.stepped_engine import MultiStepDecode
from aioserve.outputs import ModelRunnerOutput
from aioserve.params import SamplingParams
from aioserve.request import Request, RequestSpec
from aioserve.scheduler import BaseScheduler, SchedulerOutput
from aioserve.testing.bench import Bench
from aioserve.testing.calls import make_calls, with_other_ends, write_program
from aioserve.testing.side_effects import watched_calls, watched_walks
from aioserve.testing.violation import ContractViolation, HashOrder, RouterViolation

MAX_NAMED = 3  # requests of which is said what they get


def differences(plan: SchedulerOutput, other: SchedulerOutput) -> str:
    """Return what `plan` says where `other` says something else; "" if they are equal."""
    if tokens := _tokens(plan, other):
        return tokens
    pairs: dict[str, tuple[Any, Any]] = {
        "rows": (_rows(plan), _rows(other)),
        "admits": (_admitted(plan), _admitted(other)),
        "preempts": (plan.preempted_req_ids, other.preempted_req_ids),
    }
    for name in SchedulerOutput.__struct_fields__:
        pairs[name] = getattr(plan, name), getattr(other, name)
    for name, (mine, its) in pairs.items():
        if mine != its:
            return f"{name}: {mine!r:.200} instead of {its!r:.200}"
    return ""


def _tokens(plan: SchedulerOutput, other: SchedulerOutput) -> str:
    """Return requests that get other numbers of tokens."""
    mine, its = plan.num_scheduled_tokens, other.num_scheduled_tokens
    names = [name for name in {**mine, **its} if mine.get(name) != its.get(name)]
    words = [f"{n} gets {mine.get(n, 0)} instead of {its.get(n, 0)}" for n in names[:MAX_NAMED]]
    if len(names) > MAX_NAMED:
        words.append(f"{len(names) - MAX_NAMED} more differ")
    return f"tokens: {', '.join(words)}" if names else ""


def _rows(plan: SchedulerOutput) -> list[str]:
    return list(plan.num_scheduled_tokens)


def _admitted(plan: SchedulerOutput) -> list[tuple[str, int]]:
    """Return the requests that enter, each with its cached tokens."""
    return [(data.request_id, data.num_computed_tokens) for data in plan.scheduled_new_reqs]


# Whether a policy keeps what it promises with `keeps_decoding`: the same traffic, twice. Once it is
# asked for every step, once steps that only decode are done without it, as the lab does. Then every
# plan must be the same. Knows schedulers and steps. Knows nothing about a runner.


Clock = Callable[[], float]

NUM_CROWDS, CROWD_SIZE, NUM_LONG = 5, 7, 3  # the last of a crowd have long replies
# Steps without a waiting request after which the next crowd comes: while the last decodes.
PATIENCE = 40
#: Steps take this long, in seconds: a policy may look at the clock.
SHORT, LONG, NUM_SHORT = 0.004, 3.0, 120
MAX_STEPS = 3000  # many times what all of them need, one after the other


class _Plan(NamedTuple):
    """The part of a step that is compared."""

    num_tokens: list[tuple[str, int]]  # in the order of the rows
    admitted: list[tuple[str, int]]  # with the tokens that were cached
    preempted: list[str]
    new_block_ids: dict[str, list[int]]


def check_promise(
    make: Callable[[Clock], BaseScheduler], max_model_len: int, num_slots: int
) -> None:
    """Compare the plans of two schedulers that `make` makes. `max_model_len` is theirs, `num_slots`
    what their KV cache holds, in tokens. Raises `ContractViolation`.
    """
    longest = min(max_model_len, num_slots + 1)  # the last token needs no slot
    asked, trusted = _Run(make, longest, trusts=False), _Run(make, longest, trusts=True)
    name = type(asked.scheduler).__name__
    for number, (plan, expected) in enumerate(zip(asked.plans(), trusted.plans(), strict=False)):
        if plan == expected:
            continue
        if number in trusted.unasked:
            raise ContractViolation(
                f"step {number + 1}: {name} promises keeps_decoding, but plans {plan.num_tokens}: "
                f"due is one more token for each of {[row for row, _ in expected.num_tokens]}"
            )
        raise ContractViolation(
            f"step {number + 1}: {name} promises keeps_decoding, but where it was not asked for "
            f"steps that only decode it plans {_difference(expected, plan)}: it has kept something "
            "of them"
        )


class _Run:
    """One scheduler from the first crowd to the end of the last."""

    def __init__(
        self, make: Callable[[Clock], BaseScheduler], longest: int, *, trusts: bool
    ) -> None:
        self.unasked: set[int] = set()  # steps that were done without asking
        self.scheduler = make(self._clock)
        self._longest = longest
        self._trusts = trusts
        self._num_steps = 0
        self._num_quiet = 0  # steps since a request waited last
        self._num_crowds = 0

    def _clock(self) -> float:
        num_short = min(self._num_steps, NUM_SHORT)
        return SHORT * num_short + LONG * (self._num_steps - num_short)

    def plans(self) -> Iterator[_Plan]:
        """Yield the plan of every step, those that were not asked for among them."""
        scheduler = self.scheduler
        while self._num_steps < MAX_STEPS:
            is_quiet = self._num_quiet >= PATIENCE or not scheduler.has_unfinished_requests()
            if is_quiet and self._num_crowds < NUM_CROWDS:
                self._come(self._num_crowds)
                self._num_crowds += 1
            if not scheduler.has_requests():
                return
            output = scheduler.schedule()
            self._note_step()
            yield _plan(output)
            if not output.num_scheduled_tokens:
                continue
            tokens = [self._sample(name) for name in output.num_scheduled_tokens]
            if self._trusts and MultiStepDecode.follows(scheduler, output):
                decodes = MultiStepDecode(scheduler)
                is_last = self._num_crowds == NUM_CROWDS
                limit = MAX_STEPS if is_last else max(PATIENCE - self._num_quiet, 0)
                yield from self._go_on(decodes, decodes.num_steps(limit))
            result = ModelRunnerOutput(list(output.num_scheduled_tokens), tokens)
            scheduler.update_from_output(output, result)

    def _go_on(self, decodes: MultiStepDecode, count: int) -> Iterator[_Plan]:
        """Go on by `count` steps, one by one, so that what each takes can be seen."""
        for _ in range(count):
            before = [len(request.block_ids) for request in decodes.requests]
            decodes.go_on([[0] for _ in decodes.requests])
            self.unasked.add(self._num_steps)
            self._note_step()
            new = {
                request.request_id: request.block_ids[num_blocks:]
                for request, num_blocks in zip(decodes.requests, before, strict=True)
                if len(request.block_ids) > num_blocks
            }
            yield _Plan([(r.request_id, 1) for r in decodes.requests], [], [], new)

    def _note_step(self) -> None:
        self._num_steps += 1
        num_running, num_waiting = self.scheduler.get_request_counts()
        self._num_quiet = 0 if num_waiting or not num_running else self._num_quiet + 1

    def _come(self, crowd: int) -> None:
        """Some with a prefix of others. Those that will have decoded for long are of one client."""
        for i in range(CROWD_SIZE):
            is_long = i >= CROWD_SIZE - NUM_LONG
            num_prompt = 1 + self._longest * (1 + (3 * i + crowd) % CROWD_SIZE) // 40
            num_common = num_prompt // 2 if i % 2 else 0
            prompt = [7] * num_common + [crowd * CROWD_SIZE + i] * (num_prompt - num_common)
            params = SamplingParams(
                max_tokens=self._longest - num_prompt if is_long else 2 + 2 * i, ignore_eos=True
            )
            spec = RequestSpec(
                f"r{crowd}.{i}",
                prompt,
                params,
                arrival_time=self._clock(),
                priority=(5 * i + crowd) % 3,
                user="abc"[(crowd if is_long else i) % 3],
            )
            with suppress(EngineOverloadedError):  # a policy may refuse any request
                self.scheduler.add_request(Request(spec))

    def _sample(self, name: str) -> list[int]:
        request = self.scheduler.get_request(name)
        if request is None or request.num_computed_tokens < request.num_tokens:
            return []
        return [0]


def _difference(plan: _Plan, other: _Plan) -> str:
    """Return the first of what differs, tokens before the rest."""
    name = next(n for n in _Plan._fields if getattr(plan, n) != getattr(other, n))
    return f"{name} {getattr(plan, name)} instead of {getattr(other, name)}"


def _plan(output: SchedulerOutput) -> _Plan:
    return _Plan(
        list(output.num_scheduled_tokens.items()),
        [(data.request_id, data.num_computed_tokens) for data in output.scheduled_new_reqs],
        list(output.preempted_req_ids),
        dict(output.scheduled_cached_reqs.new_block_ids),
    )


# Rules that need a second run of the same calls: the same plans, without foresight or memory. Knows
# calls and plans. Knows nothing about what a plan says.


def check_repeatable(bench: Bench) -> None:
    """Nothing but the calls may matter: no clock, no hash order, no global dice."""
    again = type(bench)(bench.policy, **bench.setup)
    again.reads_gauges = False  # to look at them must change nothing
    try:
        make_calls(again, [c for c in bench.calls if not c.method.startswith("check_")])
    finally:  # an error that did not come the first time is a difference, too
        for planned, expected in zip(again.steps, bench.steps, strict=False):
            if differ := differences(planned, expected):
                raise ContractViolation(
                    f"step {expected.step_id}: the same events gave another plan the second "
                    f"time: {differ}"
                )


NUM_PLACES = 256  # requests for which there is room in memory, in an order that is chosen


def check_addresses(bench: Bench) -> None:
    """The same calls give the same plans wherever requests lie in memory."""
    calls = [call for call in bench.calls if not call.method.startswith("check_")]
    for step in (1, -1):
        again = type(bench)(bench.policy, **bench.setup)
        again.reads_gauges = False
        places: list[Any] = [object.__new__(again.writes.request_type) for _ in range(NUM_PLACES)]
        places.sort(key=id, reverse=step < 0)
        while places:  # what is freed last is taken first
            places.pop()
        make_calls(again, calls)
        for planned, expected in zip(again.steps, bench.steps, strict=False):
            if differ := differences(planned, expected):
                check_own_time(bench)  # dice may have fallen alike until now
                raise ContractViolation(
                    f"step {expected.step_id}: the same events gave another plan where requests "
                    f"lie elsewhere in memory: {differ}; does the policy order by id(), or walk "
                    "through a set of requests?"
                )


def check_own_time(bench: Bench) -> None:
    """The same calls without a call of the process' clocks, dice or sleep by the policy."""
    again = type(bench)(bench.policy, **bench.setup)
    with watched_calls(bench.policy, lambda: again.where):
        make_calls(again, [c for c in bench.calls if not c.method.startswith("check_")])


def check_walks_nowhere(bench: Bench) -> None:
    """The same calls without a walk of the policy through objects, frames or tasks of the process,
    where the lengths of replies are.
    """
    again = type(bench)(bench.policy, **bench.setup)
    with watched_walks(bench.policy, lambda: again.where):
        make_calls(again, [c for c in bench.calls if not c.method.startswith("check_")])


def check_foresees_no_end(bench: Bench) -> None:
    """The same calls, with the lengths of the given replies dealt out in reverse, give the same
    plans until the first request has ended: a policy cannot know how long a reply will be.
    """
    check_repeatable(bench)  # dice would look like foresight
    check_addresses(bench)  # and so would the places of requests in memory
    calls = [call for call in bench.calls if not call.method.startswith("check_")]
    again = type(bench)(bench.policy, **bench.setup)
    make_calls(again, with_other_ends(calls))
    num_alike = min(_num_steps_before_ends(bench), _num_steps_before_ends(again))
    for planned, expected in zip(again.steps[:num_alike], bench.steps, strict=False):
        if differ := differences(planned, expected):
            raise ContractViolation(
                f"step {expected.step_id}: no reply has ended, but the plan tells how long "
                f"they will be: with the lengths dealt out in reverse, {differ}"
            )


def _num_steps_before_ends(bench: Bench) -> int:
    """Return steps that were planned before the first request ended."""
    first = bench.ledger.first_end
    return len(bench.steps) if first is None else first


def check_keeps_decoding(bench: Bench) -> None:
    """What the policy promises with `keeps_decoding`, on requests of the kit's own, with the
    limits of this harness. Does nothing without the promise, or where nothing relies on it.
    """
    if not MultiStepDecode.is_promised_by(bench.policy):
        return
    if bench.config.depth > 1 or bench.config.num_lookahead_tokens:
        return
    num_blocks, size = bench.kv_cache.pool.num_blocks, bench.kv_cache.block_size

    def make(clock: Callable[[], float]) -> BaseScheduler:
        made: Callable[..., Any] = bench.policy
        cache = KVCacheManager(num_blocks, size)
        found = made(bench.config, cache, max_model_len=bench.max_model_len, clock=clock)
        assert isinstance(found, BaseScheduler), "it is promised by no other"
        return found

    with bench.blame("schedule"):
        check_promise(make, bench.max_model_len, bench.kv_cache.num_slots)


# Whether plans depend on the order of sets of strings, another one in every process: the same calls
# are made in two, with different values of PYTHONHASHSEED.


SEEDS = "1", "2"
SECONDS = 120.0  # for a process that imports aioserve and makes a few calls: it has hung

#: Runs the program on its input, whatever it raises, and prints what was planned.
_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
names = {}
try:
    exec(sys.stdin.read(), names)
except ImportError:
    names["harness"] = None  # the policy is of a file that only pytest finds
except Exception:
    if "harness" not in names:
        raise
print(json.dumps(names["harness"] and [
    [step.step_id, list(step.num_scheduled_tokens.items()), step.preempted_req_ids]
    for step in names["harness"].steps
]))
"""

_PlanOfChild = tuple[int, list[tuple[str, int]], list[str]]


def check_hash_order(bench: Bench) -> None:
    """Raise `HashOrder` if the calls so far give other plans where strings have other hashes. Does
    nothing for a class that a program cannot import, as one within a function.
    """
    if not _is_importable(bench.policy):
        return
    calls = [call for call in bench.calls if not call.method.startswith("check_")]
    program = write_program(bench, calls)
    children = [_start(program, seed) for seed in SEEDS]
    try:
        one, other = (_plans(child, program) for child in children)
    finally:
        for child in children:  # none goes on if another one failed
            child.kill()
            child.communicate()
    for plan, expected in zip(other or (), one or (), strict=False):
        if plan != expected:
            raise HashOrder(
                f"step {expected[0]}: the same events gave another plan where strings have other "
                f"hashes: {_told(plan)} with PYTHONHASHSEED={SEEDS[1]}, {_told(expected)} with "
                f"{SEEDS[0]}; does the policy walk through a set of strings?"
            )


def _is_importable(policy: type) -> bool:
    module = getmodule(policy)
    if module is None or module.__name__ == "__main__":
        return False
    if module.__name__.startswith("aioserve_policy_"):  # from a file, which `load_policy` loads
        return True
    return getattr(importlib.import_module(module.__name__), policy.__qualname__, None) is policy


def _start(program: str, seed: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, json.dumps(sys.path)],
        env={**os.environ, "PYTHONHASHSEED": seed},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None, "it was asked for"
    child.stdin.write(program)
    child.stdin.close()
    child.stdin = None  # `communicate` would close it again
    return child


def _plans(child: subprocess.Popen[str], program: str) -> list[_PlanOfChild] | None:
    """Return what the process has planned; None if it could not import the policy."""
    printed, errors = child.communicate(timeout=SECONDS)
    if child.returncode:
        raise RuntimeError(f"the program did not run in a process of its own:\n{program}\n{errors}")
    found: list[_PlanOfChild] | None = json.loads(printed)
    return found


def _told(plan: _PlanOfChild) -> str:
    _, tokens, preempted = plan
    words = ", ".join(f"{name} {count}" for name, count in tokens[:8])
    gone = f", preempts {', '.join(preempted)}" if preempted else ""
    return f"[{words}{', ...' if len(tokens) > 8 else ''}]{gone}"


# The same of the answers of a router or autoscaler.


_ASKING = """
import importlib, json, sys
sys.path[:] = json.loads(sys.argv[1])
module = importlib.import_module(sys.argv[2])
print(json.dumps(module.answers_of(sys.argv[3], json.loads(sys.argv[4]))))
"""


def check_answers_alike(kind: type, options: Mapping[str, Any], word: str, module: str) -> None:
    """Raise `RouterViolation` if the function `answers_of` of `module` returns other answers where
    strings have other hashes. Looks at nothing if no other process can import the class. `word`
    says what the class is.
    """
    spec = _spec_of(kind, word)
    if spec is None:
        return
    words = json.dumps(sys.path), module, spec, json.dumps(dict(options))
    one, other = (_answers_with(seed, words, word) for seed in SEEDS)
    for number, (first, second) in enumerate(zip_longest(one, other)):
        if first != second:
            raise RouterViolation(
                f"{kind.__name__}: answer {number} is {second} with PYTHONHASHSEED={SEEDS[1]} "
                f"and {first} with {SEEDS[0]}; does the {word} walk through a set of strings?"
            )


def _answers_with(hash_seed: str, words: tuple[str, ...], word: str) -> list[Any]:
    child = subprocess.run(
        [sys.executable, "-c", _ASKING, *words],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if child.returncode:
        raise RouterViolation(f"a process that asks the {word} has failed: {child.stderr[-800:]}")
    found: list[Any] = json.loads(child.stdout)
    return found


def _spec_of(kind: type, word: str) -> str | None:
    module = getmodule(kind)
    if module is None or module.__name__ == "__main__":
        return None
    if module.__name__.startswith(f"aioserve_{word}_"):  # from a file, which its loader loads
        return f"{module.__file__}:{kind.__qualname__}"
    is_there = getattr(module, kind.__qualname__, None) is kind
    return f"{module.__name__}:{kind.__qualname__}" if is_there else None
