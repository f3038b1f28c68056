"""What the lab says of vLLM: vLLM's scheduler on the lab's clock, and a real load predicted.

    python benchmarks/vllm_predicted.py like          # 300 requests of zoo-1-chat, 3 seeds
    python benchmarks/vllm_predicted.py like --victims
    python benchmarks/vllm_predicted.py mixed         # a quiet machine, half an hour

`like`: each order of requests is served three times on the same requests and step times: by vLLM's
own scheduler, whose waiting queue is sorted by that order before each step (the option `order` of
the scheduler `vllm`); by a policy of aioserve's with that order and `like: vllm`; and by the same
policy with aioserve's defaults. The KV blocks are few, so that requests are preempted. Shown are
means over all requests and seeds, and in brackets the difference to vLLM's, with the largest
difference of one seed. `--victims` shows the share of tokens that vLLM's scheduler computes in vain
on the lengths that `reproduce victims` assumes.

`mixed`: vLLM serves SmolLM2 on this CPU, in this process, with a queue of requests that come by the
clock: one client sends many long prompts in bursts, another a few short ones. Measured are vLLM's
own scheduler, `chunked_prefill` with 256 tokens a step, `fair` and `deadline`, in turns, each from
the decision log of its run. Predicted are the same four from the log under vLLM's own scheduler
alone: step times are fitted to its steps, and its requests sent through each scheduler on a virtual
clock. A shared machine may be a fifth slower in one run than in the next, which no log of the first
can tell. So each is also predicted with the step times at the speed of the run that is predicted:
what that run's steps took, in all, by what the step times say of them. The rate leaves a third of
the time free: nearer to the limit a machine whose speed drifts by a tenth has queues that differ by
half from run to run of one scheduler.

Each row has measured and predicted medians of the rounds. A sign is right if prediction and
measurement agree whether a policy is better or worse than vLLM's own scheduler, by the median of
the differences within each round; no sign is asked where the measured differences of the rounds
have both signs, or their median is under `NOISE` of vLLM's own. Needs vLLM. The last line is JSON.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from build_peers import smollm2_directory
from harness import ROOT, Args, Opt, Program, medians, turns

sys.path.append(str(ROOT))
from tests.vllm.inside import core_of, exchange, make_engine  # first: it says how vLLM is to start

# isort: split
from vllm import LLM, SamplingParams

from aioserve.config import EngineConfig
from aioserve.config.load import LIKE
from aioserve.lab import what_if
from aioserve.lab.decision_log.reader import Chronicle, DecisionLog, Life
from aioserve.lab.reproduce.claims.scheduling import (
    VICTIMS_POLICY,
    VICTIMS_PUBLISHED,
    ShortestPromptScheduler,
    wasted,
)
from aioserve.lab.simulation.run import simulate, simulated
from aioserve.lab.workloads.synthetic import (
    ClientClass,
    LogNormal,
    OnOff,
    Poisson,
    Uniform,
    WorkloadSource,
    WorkloadSpec,
    generate,
    parse_prediction,
)
from aioserve.lab.workloads.workload import Workload
from aioserve.runner.step_times import StepTimeModel
from aioserve.vllm import Recorder

program = Program(__doc__)


# On the lab's clock.


STEP_TOKENS = 2048
SHORTEST_PROMPT = f"{ShortestPromptScheduler.__module__}:{ShortestPromptScheduler.__name__}"
#: By name, aioserve's policy, the order for vLLM's queue, and what a command line would say of it.
ORDERS: dict[str, tuple[str, str | None]] = {
    "first come": ("chunked_prefill", None),
    "shortest prompt": (SHORTEST_PROMPT, SHORTEST_PROMPT),
    "shortest predicted reply": ("zoo.sjf", "zoo.sjf"),
}
OUTCOMES = ("TTFT, s", "end to end, s", "preemptions")


def configure(
    policy: str, options: dict[str, Any], preset: Sequence[tuple[str, Any]] = ()
) -> EngineConfig:
    """Return the settings of one candidate, alike in all but policy and preset."""
    overrides = [
        ("scheduler.policy", policy),
        ("scheduler.options", options),
        ("scheduler.max_num_seqs", 64),
        ("scheduler.max_num_batched_tokens", STEP_TOKENS),
        ("cache.num_kv_blocks", 1000),
        ("model.max_model_len", 4096),
        ("runner.profile", "zoo-1"),
        *preset,
    ]
    return simulated(EngineConfig.load(None, overrides))


def outcome_of(config: EngineConfig, workload: Workload) -> tuple[float, float, float]:
    """Return the `OUTCOMES` of a run."""
    outcome = simulate(config, workload)
    requests = [request for request in outcome.requests if request.is_finished]
    return (
        statistics.mean(request.ttft for request in requests),
        statistics.mean(request.end - request.arrival for request in requests),
        outcome.num_preemptions,
    )


def candidates(name: str) -> dict[str, EngineConfig]:
    """Return the three that serve an order."""
    policy, order = ORDERS[name]
    options: dict[str, Any] = {}
    if policy == "chunked_prefill":
        options["chunk_size"] = STEP_TOKENS
    return {
        "vLLM": configure("vllm", {} if order is None else {"order": order}),
        "like: vllm": configure(policy, options, LIKE["vllm"]),
        "aioserve's defaults": configure(policy, options),
    }


def show_victims(seeds: int) -> dict[str, Any]:
    """Print the shares beside those of the claim's own policy, which preempts the newest."""
    document = {}
    print("| KV blocks | vLLM | newest preempted, as the claim has it |\n|---|---|---|")
    for blocks in VICTIMS_PUBLISHED:
        shares = [
            statistics.mean(wasted(policy, {}, blocks, seed)[1] for seed in range(seeds))
            for policy in ("vllm", VICTIMS_POLICY)
        ]
        print(f"| {blocks} | {shares[0]:.3f} | {shares[1]:.3f} |", flush=True)
        document[str(blocks)] = shares
    return document


@program.command("like", seeds=3, victims=False)
def like(args: Args) -> dict[str, Any]:
    """Serve each order three times."""
    if args.victims:
        return show_victims(args.seeds)
    path = str(ROOT / "configs/workloads/zoo-1-chat.yaml")
    source = WorkloadSource(path=path, limit=300, prediction=parse_prediction("exact"))
    workloads = [source.load(seed) for seed in range(args.seeds)]
    document: dict[str, Any] = {}
    print("| order | | " + " | ".join(OUTCOMES) + " |\n|---|---|" + "---|" * len(OUTCOMES))
    for name in ORDERS:
        runs = {
            shown: [outcome_of(config, workload) for workload in workloads]
            for shown, config in candidates(name).items()
        }
        for shown, rows in runs.items():
            cells = []
            for i in range(len(OUTCOMES)):
                own, theirs = [row[i] for row in rows], [row[i] for row in runs["vLLM"]]
                mean, base = statistics.mean(own), statistics.mean(theirs)
                cell = f"{mean:.4g}"
                if shown != "vLLM" and base:
                    worst = max(abs(a / b - 1) for a, b in zip(own, theirs, strict=True) if b)
                    cell += f" ({mean / base - 1:+.1%}, {worst:.1%})"
                cells.append(cell)
            print(f"| {name} | {shown} | " + " | ".join(cells) + " |", flush=True)
        document[name] = runs
    return document


# A real load.


OWN = "vllm"
#: aioserve's policies and their options.
POLICIES: dict[str, dict[str, Any]] = {
    "chunked_prefill": {"chunk_size": 256},
    "fair": {"chunk_size": 256},
    "deadline": {},
}
MEANS = ("TTFT mean ms", "e2e mean ms", "tokens/s")
MEASURES = (*MEANS, "TTFT p99 ms", "gap p50 ms", "gap p99 ms", "light TTFT mean ms", "light share")
NOISE = 0.05
#: What is fitted to a log, each in units of time.
RATES = (
    "base_ms",
    "prefill_token_us",
    "decode_us",
    "context_token_us",
    "query_context_ns",
    "prefill_us",
    "idle_ms",
)
SETTINGS: dict[str, Any] = {
    "max_model_len": 2048,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 64,
    "num_gpu_blocks_override": 1024,
    "dtype": "bfloat16",
}


def a_load(num_requests: int, rate: float, seed: int) -> Workload:
    """Two clients: six of seven requests are the bursts of `heavy`."""
    heavy = ClientClass(
        name="heavy",
        arrivals=OnOff(rate_on=1.6 * rate, on_seconds=10, rate_off=0.2 * rate, off_seconds=10),
        prompt=LogNormal(median=350, sigma=0.7, max=1700),
        output=Uniform(min=20, max=80),
    )
    light = ClientClass(
        name="light",
        arrivals=Poisson(rate=0.15 * rate),
        prompt=LogNormal(median=60, sigma=0.6, max=400),
        output=Uniform(min=20, max=60),
    )
    return generate(WorkloadSpec(classes=[heavy, light], num_requests=num_requests), seed)


def serve(llm: LLM, load: Workload, num_tokens: int) -> None:
    """Every request comes at its time, and is served; a prompt's tokens are like no other's."""
    engine, vocabulary = llm.llm_engine, range(num_tokens // 2, num_tokens)
    began, sent = time.time() + 0.2, 0
    while sent < len(load.requests) or engine.has_unfinished_requests():
        now = time.time() - began
        while sent < len(load.requests) and load.requests[sent].arrival <= now:
            asked = load.requests[sent]
            first = 7919 * sent
            prompt = [
                vocabulary[(first + i * i) % len(vocabulary)]
                for i in range(asked.num_prompt_tokens)
            ]
            params = SamplingParams(
                temperature=0.0,
                max_tokens=asked.output_tokens,
                ignore_eos=True,
                detokenize=False,
                extra_args={"user": asked.user or asked.kind},
            )
            engine.add_request(
                str(sent), {"prompt_token_ids": prompt}, params, arrival_time=began + asked.arrival
            )
            sent += 1
        if engine.has_unfinished_requests():
            engine.step()
        elif sent < len(load.requests):
            time.sleep(max(0.0, began + load.requests[sent].arrival - time.time()))


def run(llm: LLM, name: str, load: Workload, log: Path, num_tokens: int) -> None:
    """Serve a load under one scheduler, and write its decision log."""
    if name == OWN:
        scheduler = exchange(llm, Recorder, decision_log=str(log))
    else:
        stated = {"policy": name, "options": POLICIES[name]}
        scheduler = exchange(llm, **stated, decision_log=str(log))
    serve(llm, load, num_tokens)
    scheduler.shutdown()


def write_logs(logs: dict[tuple[int, str], Path], args: Args) -> None:
    """Serve the load of each round under each scheduler."""
    llm = make_engine(**SETTINGS | {"model": str(smollm2_directory())})
    num_tokens = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    serve(llm, a_load(8, 100.0, 99), num_tokens)  # warm up; a process is slower in its first minute
    serve(llm, a_load(args.requests, args.rate, 99), num_tokens)
    for (number, name), log in logs.items():
        run(llm, name, a_load(args.requests, args.rate, 1 + number), log, num_tokens)
        print(f"round {number + 1}: {name}", file=sys.stderr, flush=True)
    core_of(llm).shutdown()


# What is measured of a run, and of its simulation.


def measures_of(chronicle: Chronicle, reference: list[Life], num_users: int) -> dict[str, float]:
    """Return measures by name; times in milliseconds. `light share`: of the first half of all
    tokens, those that the light client got.
    """
    lives = chronicle.lives[-num_users:]
    light = [life for life in lives if life.spec.user == "light"]
    first = [1e3 * (life.token_times[0] - life.arrival) for life in light if life.token_times]
    times = sorted((t, life.spec.user == "light") for life in lives for t in life.token_times)
    half = times[: len(times) // 2]
    found = what_if.measure(chronicle, reference) | {
        "light TTFT mean ms": statistics.fmean(first),
        "light share": 100 * sum(is_light for _, is_light in half) / len(half),
    }
    return {name: found[name] for name in MEASURES}


def slowness(step_time: StepTimeModel, log: DecisionLog) -> float:
    """Return what the steps of a log took in all, as a multiple of what the step times say."""
    chronicle = Chronicle(log.header)
    steps = [step for step in map(chronicle.feed, log) if step is not None]
    said = sum(step_time.seconds(step.features) for step in steps)
    return sum(step.seconds for step in steps) / said


def at_speed(step_time: StepTimeModel, factor: float) -> StepTimeModel:
    """Return step times that are `factor` times as long."""
    rates = {name: factor * getattr(step_time, name) for name in RATES}
    return msgspec.structs.replace(step_time, **rates)


def predict(traffic: what_if.Traffic, name: str) -> dict[str, float]:
    """Return the same measures of a scheduler that serves the traffic on a virtual clock."""
    if name == OWN:
        chronicle = what_if.simulate(
            traffic, what_if.make_plan(traffic, None, []), is_recorded=True
        )
    else:
        options = [(f"scheduler.options.{n}", str(v)) for n, v in POLICIES[name].items()]
        chronicle = what_if.simulate(traffic, what_if.make_plan(traffic, name, options))
    return measures_of(chronicle, traffic.lives, len(traffic.lives))


Rounds = dict[str, list[dict[str, float]]]  # by scheduler, the measures of each round


def signs(measured: Rounds, predicted: Rounds) -> tuple[int, list[str]]:
    """Return how many signs were asked, and which are wrong, in words."""

    def differences(rounds: Rounds, name: str, what: str) -> list[float]:
        pairs = zip(rounds[name], rounds[OWN], strict=True)
        return [row[what] - own[what] for row, own in pairs]

    num_asked, wrong = 0, []
    for name in POLICIES:
        for what in MEASURES:
            found = differences(measured, name, what)
            middle = statistics.median(found)
            own = statistics.median(row[what] for row in measured[OWN])
            if min(found) <= 0 <= max(found) or abs(middle) < NOISE * abs(own):
                continue
            num_asked += 1
            if middle * statistics.median(differences(predicted, name, what)) <= 0:
                wrong.append(f"{name}, {what}")
    return num_asked, wrong


def tell(title: str, found: Rounds, predictions: Rounds) -> list[str]:
    """Print a table of medians, the signs and the errors of means; return the wrong signs."""
    measured = {name: medians(rows) for name, rows in found.items()}
    predicted = {name: medians(rows) for name, rows in predictions.items()}
    print(f"\nPredicted {title}")
    print("measured / predicted".ljust(22) + "".join(f"{name:>22}" for name in found))
    for what in MEASURES:
        pairs = (f"{measured[n][what]:.1f} / {predicted[n][what]:.1f}" for n in found)
        print(what.ljust(22) + "".join(f"{pair:>22}" for pair in pairs))
    num_asked, wrong = signs(found, predictions)
    errors = [abs(predicted[n][w] / measured[n][w] - 1) for n in found for w in MEANS]
    print(f"{num_asked - len(wrong)} of {num_asked} signs are right; wrong: {wrong or 'none'}")
    print(f"means: off by {100 * statistics.fmean(errors):.1f}%, at most {100 * max(errors):.1f}%")
    return wrong


@program.command("mixed", requests=60, rate=Opt(1.0, "requests a second, about"), rounds=6)
def mixed(args: Args) -> tuple[dict[str, Any], int]:
    """Measure the four schedulers in turns, and predict them."""
    found: Rounds = {name: [] for name in (OWN, *POLICIES)}
    predictions: Rounds = {name: [] for name in found}
    at_own_speed: Rounds = {name: [] for name in found}
    with tempfile.TemporaryDirectory() as folder:
        logs = {
            turn: Path(folder, "{}-{}.log".format(*turn))
            for turn in turns(list(found), args.rounds)
        }
        write_logs(logs, args)
        for number in range(args.rounds):
            own = what_if.read_traffic(DecisionLog(logs[number, OWN]))
            for name in found:
                log = DecisionLog(logs[number, name])
                traffic = what_if.read_traffic(log)
                found[name].append(
                    measures_of(traffic.chronicle, traffic.lives, len(traffic.lives))
                )
                predictions[name].append(predict(own, name))
                step_time = at_speed(own.step_time, slowness(own.step_time, log))
                at_own_speed[name].append(predict(own._replace(step_time=step_time), name))
    wrong = {
        title: tell(title, found, rounds)
        for title, rounds in {
            "from the log alone": predictions,
            "at each run's speed": at_own_speed,
        }.items()
    }
    told = {
        "measured": found,
        "predicted": predictions,
        "predicted at each run's speed": at_own_speed,
    }
    return told | {"wrong signs": wrong}, int(any(wrong.values()))


if __name__ == "__main__":
    program.main()
