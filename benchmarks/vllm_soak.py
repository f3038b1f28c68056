"""Everything mixed against a vLLM under aioserve's scheduler: is what was taken given back?

    python benchmarks/vllm_soak.py [--seconds 600] [--asynchronous]
    python benchmarks/vllm_soak.py --scheduler vllm    # its own: does its memory grow as well?

vLLM in this process, with few KV blocks, so that requests are preempted. Requests of all kinds come
and a fifth of them is aborted, at any time; every few seconds another policy takes over, new
requests are paused, or the prefix cache is emptied. Every step is looked at by the rules of the
contract. One request in eight is one of a dozen greedy ones, whose tokens are known from an idle
vLLM. Now and then all is let run out: each request must have ended once, and no more KV blocks may
be in use than at the start. `--scheduler unchecked` leaves out the rules, which remember 4,096
requests; `--scheduler vllm` is vLLM's own, whose policy stays. At each rest it prints what the
process has in memory. The last line is JSON; the exit status is 1 if anything is wrong. Needs vLLM.
"""

import argparse
import json
import random
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from harness import ROOT

sys.path.append(str(ROOT))
from tests.vllm.inside import (  # first: it says how vLLM is to start
    TIGHT,
    Asked,
    a_load,
    check_over,
    core_of,
    exchange,
    give_back,
    make_engine,
)

# isort: split
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

POLICIES = [
    *("chunked_prefill", "priority", "fair", "deadline", "mlfq", "hrrn"),
    *("latency_budget", "prefix_aged", "zoo.sjf", "zoo.srpt"),
]
QUIET_EVERY = 30.0  # seconds
CHANGE_EVERY = 3.0  # seconds between what an operator does
MOST_UNFINISHED = 40


class Soak:
    """One vLLM, what was sent to it, and what came back."""

    def __init__(self, llm: LLM, seed: int, kind: str) -> None:
        """`kind`: which scheduler plans, `checked`, `unchecked` or `vllm`."""
        self.is_own = kind == "vllm"
        self.llm, self.engine, self.dice = llm, llm.llm_engine, random.Random(seed)
        self.load = a_load(200, seed=7)
        self.known = [
            each._replace(params={"temperature": 0.0, "max_tokens": 12, "ignore_eos": True})
            for each in a_load(12, seed=11)
        ]
        self.expected = [self._alone(each) for each in self.known]
        self.scheduler = exchange(llm, policy="chunked_prefill", check=kind == "checked")
        if self.is_own:
            give_back(llm)
            self.scheduler = core_of(llm).scheduler
        self.free_at_start = self._num_free()
        self.unfinished: dict[str, int | None] = {}  # by id the place in `known`
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.memory: list[float] = []  # MiB, at each rest

    def _alone(self, asked: Asked) -> list[int]:
        params = SamplingParams(**asked.params)
        [output] = self.llm.generate([{"prompt_token_ids": asked.prompt}], params, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    def _num_free(self) -> int:
        if self.is_own:
            return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())
        pool = self.scheduler.policy.kv_cache.pool
        return int(pool.num_blocks - pool.num_used_blocks)

    def send(self) -> None:
        """One request, of any kind."""
        dice = self.dice
        self.counts["sent"] += 1
        name, fields = str(self.counts["sent"]), {"priority": dice.randrange(3)}
        place = dice.randrange(len(self.known)) if dice.random() < 1 / 8 else None
        asked = dice.choice(self.load) if place is None else self.known[place]
        params = dict(asked.params)
        if place is None:
            if dice.random() < 0.1:
                params = {"max_tokens": 20, "temperature": 0.0}
                regex = StructuredOutputsParams(regex="[a-c]{3,9}x")
                params["structured_outputs"] = regex
            params["extra_args"] = {"user": f"u{dice.randrange(5)}"}
            if dice.random() < 0.05 and not self.is_own:
                params["extra_args"]["deadline"] = 0.05 + dice.random()
        prompt = {"prompt_token_ids": asked.prompt, **asked.fields}
        self.engine.add_request(name, prompt, SamplingParams(**params), **fields)
        self.unfinished[name] = place

    def abort(self) -> None:
        """A client leaves, which may have its reply already."""
        name = self.dice.choice(list(self.unfinished))
        self.engine.abort_request([name])
        del self.unfinished[name]
        self.counts["aborted"] += 1

    def step(self) -> None:
        """One step of vLLM."""
        for output in self.engine.step():
            if not output.finished:
                continue
            name = output.request_id
            if name not in self.unfinished:
                self.wrong.append(f"{name} has ended twice, or after its abort")
                continue
            place = self.unfinished.pop(name)
            self.counts["ended"] += 1
            self.counts[f"ended by {output.outputs[0].finish_reason}"] += 1
            if place is not None:
                self.counts["known replies"] += 1
                if list(output.outputs[0].token_ids) != self.expected[place]:
                    self.wrong.append(f"{name}: another reply to prompt {place} than when idle")

    def change(self) -> None:
        """What an operator does."""
        kind = self.dice.random()
        if kind < 0.7:
            if self.is_own:
                return
            self.scheduler.switch(self.dice.choice(POLICIES))
            self.counts["switches"] += 1
        elif kind < 0.85:
            states = type(self.scheduler.pause_state)
            self.scheduler.set_pause_state(states.PAUSED_NEW)
            for _ in range(5):
                self.step()
            self.scheduler.set_pause_state(states.UNPAUSED)
            self.counts["pauses"] += 1
        else:
            self.scheduler.reset_prefix_cache(reset_running_requests=True)
            self.counts["resets"] += 1

    def run_out(self) -> None:
        """Serve what is there, and look at what is left then."""
        limit = time.monotonic() + 300
        while self.engine.has_unfinished_requests() and time.monotonic() < limit:
            self.step()
        for _ in range(3):  # the runner hears of the last ends
            self.step()
        self.counts["times quiet"] += 1
        if self.unfinished:
            self.wrong.append(f"{len(self.unfinished)} requests were lost: {self.unfinished}")
            self.unfinished.clear()
        if (free := self._num_free()) != self.free_at_start:
            self.wrong.append(f"{free} KV blocks are free, and were {self.free_at_start}")
        if self.is_own:
            return
        try:
            check_over(self.scheduler)
        except Exception as error:
            self.wrong.append(f"{type(error).__name__}: {error}")

    def run(self, seconds: float) -> None:
        """All of it, for as long as stated or until something is wrong."""
        began = time.monotonic()
        quiet, change = began + QUIET_EVERY, began + CHANGE_EVERY
        while time.monotonic() < began + seconds and not self.wrong:
            for _ in range(self.dice.randrange(4)):
                if len(self.unfinished) < MOST_UNFINISHED:
                    self.send()
            if self.unfinished and self.dice.random() < 0.1:
                self.abort()
            self.step()
            self.counts["steps"] += 1
            now = time.monotonic()
            if now > change:
                self.change()
                change = now + CHANGE_EVERY
            if now > quiet:
                self.run_out()
                memory = resident_mebibytes()
                self.memory.append(memory)
                print(f"{now - began:6.0f} s  {memory:.1f} MiB  {dict(self.counts)}", flush=True)
                quiet = time.monotonic() + QUIET_EVERY
        self.run_out()


def resident_mebibytes() -> float:
    """Return what this process has in memory now, not at most so far."""
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return num_pages * resource.getpagesize() / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--asynchronous", action="store_true", help="two steps in flight")
    parser.add_argument("--scheduler", default="checked", choices=["checked", "unchecked", "vllm"])
    arguments = parser.parse_args()
    llm = make_engine(**TIGHT, asynchronous=arguments.asynchronous)
    soak = Soak(llm, arguments.seed, arguments.scheduler)
    soak.run(arguments.seconds)
    if not soak.is_own:
        stats: Any = soak.scheduler.policy.make_stats()
        soak.counts["preemptions"] = stats.num_preemptions
    for words in soak.wrong:
        print(words)
    give_back(llm)
    core_of(llm).shutdown()
    memory = [round(each, 1) for each in soak.memory]
    print(json.dumps({"counts": dict(soak.counts), "memory_mib": memory, "wrong": soak.wrong}))
    return int(bool(soak.wrong))


if __name__ == "__main__":
    sys.exit(main())
