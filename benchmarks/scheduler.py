"""What the scheduler costs, and the engine around it: microseconds per step, and per row of one.

    python benchmarks/scheduler.py [--policy fcfs ...] [--case steady ...] [--waiting 0 10000]
    python benchmarks/scheduler.py --against HEAD~5    # or a directory: ratios, in turns
    python benchmarks/scheduler.py --policy configs/composed.yaml --beside fair    # so, too

`steady`: decodes alone. `churn`: every step some end and as many come. `bursts`: twice as many as
there are seats come at once to a pool that has room for half of the seats, so that some are
preempted, and again when as many have ended. Of these `add_request()`, `schedule()` and
`update_from_output()`, without model or event loop, with prefix caching in blocks of 16 tokens.
Requests come from 100 clients in turn; under `fair`, whose choice is among the clients that wait,
from 10,000 as well where requests wait (`--users`).
`engine`: streams of `AsyncEngine` on the virtual clock, with a simulated runner, without text: CPU
time per token, the scheduler's included.

Time is modelled, so that policies decide the same every time. The aim is at most 2 microseconds per
running request in `steady`. With `--against` a case that is slower by more than `--tolerance` makes
the exit code 1. The last line is JSON.
"""

import asyncio
import gc
import statistics
import time
from typing import Any, NamedTuple

import against
from harness import ROOT, Args, Opt, Program, Table

from aioserve.config import CacheConfig, EngineConfig, ModelConfig, RunnerConfig, SchedulerConfig
from aioserve.kv_cache import KVCacheManager
from aioserve.outputs import ModelRunnerOutput
from aioserve.params import SamplingParams
from aioserve.request import Request, RequestSpec
from aioserve.scheduler import BaseScheduler, SchedulerOutput, load_policy

POLICIES = sorted(path.stem for path in (ROOT / "policies").glob("[a-z]*.py"))
CASES = ("steady", "churn", "bursts", "engine")
BLOCK_SIZE = 16
PROMPT_TOKENS = 200
SHARED_TOKENS = 64  # of a prompt, with a fifth of the others
LIFE = 64  # steps that a request stays, about, where any end
EOS = 1
MAX_STEPS = 5000  # in steady decode
MAX_FILL_STEPS = 5000
FEW_USERS, MANY_USERS = 100, 10_000


class Case(NamedTuple):
    """What is measured. A policy is given by name, or by a YAML file that has options of it."""

    policy: str
    kind: str
    running: int
    waiting: int = 0
    users: int = FEW_USERS  # who ask, in turn

    @property
    def name(self) -> str:
        """For people."""
        parts = [self.policy, self.kind, f"{self.running} run"]
        parts += [f"{self.waiting} wait"] if self.waiting else []
        parts += [f"{self.users} ask"] if self.users != FEW_USERS else []
        return " ".join(parts)


class Times(NamedTuple):
    """CPU seconds of one step, and of adding those who came before it; `rows` were served."""

    add: float
    schedule: float
    update: float
    rows: int


class SchedulerWork:
    """A scheduler with its requests, and a clock on which steps take what they might."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._now = 0.0
        self._num_made = 0
        self._known: dict[str, int] = {}  # tokens of those in the batch; by admission
        self.num_ended = self.num_preempted = 0
        self._num_to_come = 0
        self.scheduler = self._make_scheduler()
        for _ in range(case.waiting + (0 if case.kind == "bursts" else case.running)):
            self.scheduler.add_request(self._make_request())
        if case.kind != "bursts":
            self._fill()

    def _make_scheduler(self) -> BaseScheduler:
        case, seats = self.case, self.case.running
        num_blocks = {
            "steady": seats * -(-(PROMPT_TOKENS + MAX_STEPS) // BLOCK_SIZE),
            "churn": seats * -(-(PROMPT_TOKENS + 4 * LIFE) // BLOCK_SIZE),
            "bursts": seats // 2 * -(-(PROMPT_TOKENS + LIFE) // BLOCK_SIZE),
        }[case.kind]
        num_blocks = max(num_blocks, -(-(PROMPT_TOKENS + 2 * LIFE) // BLOCK_SIZE))  # of the longest
        policy, options = case.policy, dict[str, Any]()
        if policy.endswith(".yaml"):
            named = EngineConfig.load(policy).scheduler
            policy, options = named.policy, named.options
        if case.policy == "chunked_prefill":
            options = {"chunk_size": max(512, 2 * seats)}  # all decodes, and some prompts
        elif case.policy == "mlfq" and case.kind == "steady":
            options = {"quantum": 2**60}  # no running request gives way to a waiting one
        config = SchedulerConfig(
            max_num_seqs=seats,
            max_num_batched_tokens=max(2 * MAX_STEPS, PROMPT_TOKENS * seats),
            max_waiting_requests=3 * seats + case.waiting + 1,
            options=options,
        )
        make_scheduler: Any = load_policy(policy)
        scheduler: BaseScheduler = make_scheduler(
            config,
            KVCacheManager(num_blocks, BLOCK_SIZE),
            max_model_len=PROMPT_TOKENS + MAX_STEPS,
            clock=lambda: self._now,
        )
        return scheduler

    def _make_request(self) -> Request:
        case, number = self.case, self._num_made
        self._num_made += 1
        own = PROMPT_TOKENS - SHARED_TOKENS - number % BLOCK_SIZE  # block borders in other steps
        most = {"steady": MAX_STEPS, "churn": 4 * LIFE, "bursts": LIFE // 2 + number % LIFE}
        params = SamplingParams(max_tokens=most[case.kind])
        return Request(
            RequestSpec(
                f"request-{number}",
                [2 + number % 5] * SHARED_TOKENS + [10 + number % 9973] * own,
                params,
                arrival_time=self._now + 1e-9 * number,
                eos_token_ids=(EOS,),
                priority=0 if case.kind == "steady" else number % 3,
                user=f"user-{number * 7919 % case.users}",
            )
        )

    def _fill(self) -> None:
        """Until all seats are taken and all prompts computed."""
        for _ in range(MAX_FILL_STEPS):
            if self.step([], 0).rows == self.case.running == len(self._known):
                return
        raise SystemExit(f"{self.case.name}: not all run after {MAX_FILL_STEPS} steps")

    def round(self, num_units: int) -> tuple[float, float]:
        """Units are steps; of `bursts`, bursts."""
        steps = self.steps(num_units)
        rows = sum(step.rows for step in steps)
        return sum(step.add + step.schedule + step.update for step in steps), rows + self._now

    def close(self) -> None:
        """It has nothing to give back."""

    def steps(self, num_units: int) -> list[Times]:
        """Run this number of units, step by step."""
        if self.case.kind == "bursts":
            return [step for _ in range(num_units) for step in self._burst()]
        num_leaving = max(1, self.case.running // LIFE) if self.case.kind == "churn" else 0
        ready = [self._make_request() for _ in range(num_units * num_leaving)]
        found = []
        for _ in range(num_units):
            coming, self._num_to_come = self._num_to_come, 0
            found.append(self.step([ready.pop() for _ in range(coming)], num_leaving))
        return found

    def _burst(self) -> list[Times]:
        size = 2 * self.case.running
        coming = [self._make_request() for _ in range(size)]
        until, found = self.num_ended + size, []
        while self.num_ended < until:
            found.append(self.step(coming, 0))
            coming = []
        return found

    def step(self, coming: list[Request], num_leaving: int) -> Times:
        """Add requests, plan a step and take in a result by which the oldest requests end."""
        scheduler, clock = self.scheduler, time.thread_time
        began = clock()
        for request in coming:
            scheduler.add_request(request)
        added = clock()
        output = scheduler.schedule()
        planned = clock()
        result = self._compute(output, num_leaving)
        computed = clock()
        outputs = scheduler.update_from_output(output, result) if result.req_ids else {}
        updated = clock()
        for client in outputs.values():
            for one in client.outputs:
                if one.finish_reason is not None:
                    self.num_ended += 1
                    self._num_to_come += 1
        return Times(added - began, planned - added, updated - computed, len(result.req_ids))

    def _compute(self, output: SchedulerOutput, num_leaving: int) -> ModelRunnerOutput:
        known = self._known
        self.num_preempted += len(output.preempted_req_ids)
        for request_id in (*output.finished_req_ids, *output.preempted_req_ids):
            known.pop(request_id, None)
        cached = output.scheduled_cached_reqs
        done = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in output.scheduled_new_reqs:
            known[new.request_id] = len(new.token_ids)
            done[new.request_id] = new.num_computed_tokens
        scheduled = output.num_scheduled_tokens
        sampled = {}
        for request_id, count in scheduled.items():
            sampled[request_id] = [7] if done[request_id] + count >= known[request_id] else []
            known[request_id] += len(sampled[request_id])
        if num_leaving:
            oldest = (request_id for request_id in known if sampled.get(request_id))
            for request_id, _ in zip(list(oldest), range(num_leaving), strict=False):
                sampled[request_id] = [EOS]
        num_rows = len(scheduled)
        num_prefill = output.total_num_scheduled_tokens - num_rows
        self._now += 0.004 + 5e-5 * num_prefill + 1e-5 * num_rows
        return ModelRunnerOutput(list(scheduled), list(sampled.values()))


class EngineWork:
    """Streams in a closed loop: each client that is answered asks again."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._num_tokens = 0
        self._until = 0
        self._num_asked = 0
        self._reached = asyncio.Event()
        from aioserve.lab import VirtualClockEventLoop  # imports more than the other cases need

        self._runner = asyncio.Runner(loop_factory=VirtualClockEventLoop)
        self._runner.run(self._start())

    async def _start(self) -> None:
        from aioserve import AsyncEngine

        case = self._case
        blocks = case.running * -(-(PROMPT_TOKENS + 4 * LIFE) // BLOCK_SIZE)
        config = EngineConfig(
            model=ModelConfig(skip_tokenizer_init=True),
            cache=CacheConfig(num_kv_blocks=max(blocks, 512)),
            runner=RunnerConfig(runner="simulated"),
            scheduler=SchedulerConfig(policy=case.policy, max_num_seqs=case.running),
        )
        self._engine = AsyncEngine(config)
        await self._engine.__aenter__()
        self._clients = [asyncio.create_task(self._client()) for _ in range(case.running)]
        await self._reach(case.running * LIFE)

    async def _client(self) -> None:
        while True:
            self._num_asked += 1
            number = self._num_asked
            prompt = [2 + number % 5] * SHARED_TOKENS
            prompt += [10 + number % 1999] * (PROMPT_TOKENS - SHARED_TOKENS - number % BLOCK_SIZE)
            params = SamplingParams(
                max_tokens=LIFE // 2 + number % LIFE, ignore_eos=True, detokenize=False
            )
            user = f"user-{number % self._case.users}"
            async for output in self._engine.generate(
                prompt, params, user=user, priority=number % 3, request_id=f"request-{number}"
            ):
                self._num_tokens += len(output.token_ids)
            if self._num_tokens >= self._until:
                self._reached.set()

    async def _reach(self, num_tokens: int) -> tuple[float, int]:
        self._reached.clear()
        before, self._until = self._num_tokens, self._num_tokens + num_tokens
        began = time.thread_time()
        await self._reached.wait()
        return time.thread_time() - began, self._num_tokens - before

    def round(self, num_units: int) -> tuple[float, float]:
        """Units are tokens of every stream, about."""
        seconds, num_tokens = self._runner.run(self._reach(num_units * self._case.running))
        return seconds, num_tokens

    def close(self) -> None:
        """The clients leave, the engine ends."""
        self._runner.run(self._end())
        self._runner.close()

    async def _end(self) -> None:
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        await self._engine.__aexit__(None, None, None)


def make_work(case: Any) -> SchedulerWork | EngineWork:
    """From plain data."""
    case = Case(*case)
    return EngineWork(case) if case.kind == "engine" else SchedulerWork(case)


def measure(case: Case, num_steps: int) -> dict[str, Any]:
    """Medians over the steps, in microseconds; of `engine` and `bursts`, means."""
    row: dict[str, Any] = case._asdict()
    if case.kind == "engine":
        engine = EngineWork(case)
        seconds, tokens = engine.round(num_steps)
        engine.close()
        return {**row, "us_per_row": round(1e6 * seconds / tokens, 3)}
    work = SchedulerWork(case)
    work.steps(1 if case.kind == "bursts" else 50)
    times = work.steps(max(num_steps // 200, 1) if case.kind == "bursts" else num_steps)
    average = statistics.mean if case.kind == "bursts" else statistics.median
    for name in ("add", "schedule", "update"):
        row[f"{name}_us"] = round(1e6 * average(getattr(step, name) for step in times), 1)
    spent = sum(step.add + step.schedule + step.update for step in times)
    return {**row, "us_per_row": round(1e6 * spent / sum(step.rows for step in times), 3)}


def usual_users(policy: str, waiting: int) -> list[int]:
    """How many clients ask; `fair` decides among those that wait."""
    return [FEW_USERS, MANY_USERS] if policy == "fair" and waiting else [FEW_USERS]


def print_all(cases: list[Case], num_steps: int) -> dict[str, Any]:
    """A line for each."""
    counts = {"running": "8", "waiting": "8", "users": "7"}
    times = {"add_us": "9.1f", "schedule_us": "12.1f", "update_us": "10.1f", "us_per_row": "11.3f"}
    table = Table({"policy": "<16", "kind": "<8", **counts, **times})
    for case in cases:
        gc.collect()
        table.add(measure(case, num_steps))
    return {"rows": table.rows}


program = Program(__doc__)


@program.command(
    "",
    {},
    policy=POLICIES,
    case=Opt(CASES, choices=CASES),
    running=Opt([64], "at once"),
    waiting=Opt([0, 10_000], "behind them"),
    users=Opt(
        [0],
        f"clients that ask, in turn; 0: {FEW_USERS}, fair with requests waiting {MANY_USERS} too",
    ),
    steps=300,
    beside=Opt(str, "compare with this policy, name or YAML file"),
    **against.OPTIONS,
)
def main(args: Args) -> tuple[dict[str, Any] | None, int]:
    """Measure all cases, or compare them."""
    if args.turns:
        against.take_turns(make_work)
        return None, 0
    cases = [
        Case(policy, kind, running, waiting, users)
        for policy in args.policy
        for kind in args.case
        for running in args.running
        for waiting in (args.waiting if kind != "engine" else [0])
        for users in (args.users if any(args.users) else usual_users(policy, waiting))
    ]
    if args.against is None and args.beside is None:
        return print_all(cases, args.steps), 0
    named = [(case.name, list(case)) for case in cases]
    return against.report([__file__], named, args, lambda case: [args.beside or case[0], *case[1:]])


if __name__ == "__main__":
    program.main()
