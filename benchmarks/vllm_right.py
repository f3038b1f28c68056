"""Whether aioserve's scheduler is right in vLLM: the tokens of replies, and a soak.

    python benchmarks/vllm_right.py tokens      # 300 prompts, each kind of vLLM, in float32
    python benchmarks/vllm_right.py tokens --kinds drafts --prompts 40
    python benchmarks/vllm_right.py soak [--seconds 600] [--asynchronous]

`tokens`: SmolLM2 (98 MB, fetched once) answers greedily: prompts that share prefixes and are split
over steps, a pool of KV blocks in which requests are preempted, clients that leave, three samples,
JSON, choices and patterns. First vLLM's scheduler is compared with itself, with the prompts in
another order, fewer seats and shorter steps: sums over a batch of another size are rounded in
another way, and two tokens that are nearly as likely may change places. Then aioserve's is compared
with it. A reply that differs is a tie if, alone in vLLM, the two tokens at which it parts are less
than `TIE` apart in log-probability. The exit status is 1 if anything else differs.

`soak`: vLLM in this process, with few KV blocks, so that requests are preempted. Requests of all
kinds come and a fifth of them is aborted, at any time; every few seconds another policy takes over,
new requests are paused, or the prefix cache is emptied. Every step is looked at by the rules of the
contract. One request in eight is one of a dozen greedy ones, whose tokens are known from an idle
vLLM. Now and then all is let run out: each request must have ended once, and no more KV blocks may
be in use than at the start. The exit status is 1 if anything is wrong.

Needs vLLM. The last line is JSON.
"""

import json
import random
import sys
import time
from collections import Counter
from itertools import zip_longest
from typing import Any, NamedTuple

from build_peers import smollm2_directory
from harness import ROOT, TEXTS, Args, Opt, Program, Table

sys.path.append(str(ROOT))
from tests.vllm import inside  # first: it says how vLLM is to start
from tests.vllm.inside import (
    Asked,
    Served,
    check_over,
    core_of,
    exchange,
    give_back,
    make_engine,
    serve,
)

# isort: split
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

program = Program(__doc__)


# Tokens.


#: Difference of two log-probabilities, in nats, under which a rounding decides; by the type of the
#: weights. bfloat16 has 8 bits: a logit of 16 to 32 is rounded to an eighth, at several places.
TIE = {"float32": 0.001, "bfloat16": 0.5}
#: The least part of the requests that has to end under both: the rest are those that are aborted.
ENDED = 0.6

#: A pool in which some of 300 requests are preempted, and steps in which prompts are split.
TIGHT = {
    "num_gpu_blocks_override": 48,
    "max_num_batched_tokens": 192,
    "max_num_seqs": 24,
    "max_model_len": 512,
}
#: Limits of vLLM's scheduler under which its batches have other sizes.
OTHER_SIZES = {"max_num_scheduled_tokens": 100, "max_num_active_reqs": 12}
NGRAMS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
#: vLLM's settings of each kind, and aioserve's policy.
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, "chunked_prefill"),
    "asynchronous": ({"asynchronous": True}, "mlfq"),
    "drafts": ({"speculative_config": NGRAMS}, "priority"),
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def a_load(count: int, tokenizer: Any, *, samples: bool) -> list[Asked]:
    """Questions behind one of four texts, no two alike; of every kind some requests."""
    dice = random.Random(3)
    questions = [form.format(topic) for form in TEXTS["forms"] for topic in TEXTS["topics"]]
    dice.shuffle(questions)
    load = []
    for i in range(count):
        words = [
            {"role": "system", "content": dice.choice(TEXTS["systems"])},
            {"role": "user", "content": questions[i % len(questions)] + " " * (i // 300)},
        ]
        prompt = tokenizer.apply_chat_template(
            words, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        params: dict[str, Any] = {"temperature": 0.0, "max_tokens": dice.randrange(4, 28)}
        kind = dice.random()
        if kind < 0.12 and samples:  # vLLM takes no greedy samples: these are, by `top_k`
            params |= {"n": 3, "temperature": 0.5, "top_k": 1}
        elif kind < 0.18:
            params["structured_outputs"] = StructuredOutputsParams(json=json.dumps(PERSON))
        elif kind < 0.22:
            params["structured_outputs"] = StructuredOutputsParams(choice=["yes", "no", "perhaps"])
        elif kind < 0.26:
            params["structured_outputs"] = StructuredOutputsParams(regex="(the|a) [a-z]{3,9} of")
        elif kind < 0.36:
            params |= {"ignore_eos": True}
        load.append(Asked(prompt, params, {"cache_salt": "salted"} if i % 25 == 0 else {}))
    return load


# Two runs beside each other.


class Difference(NamedTuple):
    """A reply that is not the same in two runs."""

    request: int  # its place in the load
    place: int  # of the first token that differs
    gap: float  # of the log-probabilities of both tokens there, in nats


class Compared(NamedTuple):
    """What two runs of one load have in common."""

    num_replies: int  # of requests that ended in both, each sample by itself
    differences: list[Difference]

    def line(self, name: str, tie: float) -> dict[str, Any]:
        """A row of the table."""
        return {
            "run": name,
            "replies": self.num_replies,
            "equal": self.num_replies - len(self.differences),
            "part at a tie": sum(each.gap < tie for each in self.differences),
            "others": sum(each.gap >= tie for each in self.differences),
            "widest gap": round(max((each.gap for each in self.differences), default=0.0), 4),
        }


def compare(llm: LLM, load: list[Asked], one: Served, other: Served) -> Compared:
    """Reply by reply. Aborts may catch another step, so that both have not all the same replies."""
    both = sorted(one.replies.keys() & other.replies.keys(), key=int)
    most = max(len(one.replies), len(other.replies))
    if len(both) < ENDED * most:
        raise AssertionError(f"{len(both)} of {most} requests have ended in both runs")
    num_replies, differences = 0, []
    for name in both:
        replies = [each.replies[name][:-1] for each in (one, other)]  # the last are logprobs
        for first, second in zip(*replies, strict=True):
            num_replies += 1
            if first[:2] != second[:2]:  # tokens, reason
                prompt = load[int(name)].prompt
                place, gap = _part(llm, prompt, first[0], second[0])
                differences.append(Difference(int(name), place, gap))
    return Compared(num_replies, differences)


def _part(llm: LLM, prompt: list[int], one: list[int], other: list[int]) -> tuple[int, float]:
    """Return where two replies part, and how far apart both tokens are for the model there."""
    pairs = enumerate(zip_longest(one, other))
    place, tokens = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    if None in tokens:
        return place, float("inf")  # one has ended behind the same tokens
    found = []
    for token in tokens:
        ids = [*prompt, *one[:place], token]
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        [output] = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        last = output.prompt_logprobs[-1]
        assert last is not None
        found.append(last[token].logprob)
    return place, abs(found[0] - found[1])


def run_kind(kind: str, num_prompts: int, dtype: str) -> list[dict[str, Any]]:
    """Return the rows of one kind of vLLM. Raises `AssertionError` if aioserve's scheduler breaks a
    rule of the contract, or had to preempt nothing.
    """
    own, policy = KINDS[kind]
    settings = {"model": str(smollm2_directory()), "dtype": dtype, **TIGHT, **own}
    if num_prompts < 100:  # fewer requests fill the pool at once less often
        settings["num_gpu_blocks_override"] = 36
    llm = make_engine(**settings)
    # vLLM's sampler of drafts takes no `top_k` on a CPU.
    load = a_load(num_prompts, llm.get_tokenizer(), samples=kind != "drafts")
    theirs = serve(llm, load)
    scheduler = exchange(llm, policy=policy, check=True)
    ours = serve(llm, load)
    check_over(scheduler)
    stats = scheduler.policy.make_stats()
    notes = {
        "preempted": stats.num_preemptions,
        "cached": ours.num_cached,
        "accepted drafts": stats.num_accepted_tokens,
    }
    assert stats.num_preemptions
    assert ours.num_cached
    assert (stats.num_accepted_tokens > 0) == (kind == "drafts")
    give_back(llm)
    row = compare(llm, load, theirs, ours).line(policy, TIE[dtype]) | notes
    order = list(range(len(load)))
    random.Random(5).shuffle(order)
    own_scheduler = core_of(llm).scheduler
    for name, value in OTHER_SIZES.items():
        setattr(own_scheduler, name, value)
    mixed = serve(llm, [load[i] for i in order])
    mixed = mixed._replace(replies={str(order[int(n)]): r for n, r in mixed.replies.items()})
    noise = compare(llm, load, theirs, mixed).line("vLLM", TIE[dtype])
    core_of(llm).shutdown()
    return [{"kind": kind, "dtype": dtype, **each} for each in (noise, row)]


@program.command(
    "tokens",
    prompts=300,
    kinds=Opt(list(KINDS), choices=KINDS),
    dtype=Opt("float32", choices=TIE),
)
def tokens(args: Args) -> tuple[dict[str, Any], int]:
    """Replies under both schedulers, kind by kind."""
    columns = ("replies", "equal", "part at a tie", "others", "widest gap", "preempted", "cached")
    table = Table({"kind": "<14", "run": "<17", **dict.fromkeys(columns, ">15")})
    for kind in args.kinds:
        for row in run_kind(kind, args.prompts, args.dtype):
            table.add(row)
    return {"rows": table.rows}, int(any(row["others"] for row in table.rows))


# Soak.


POLICIES = [
    *("chunked_prefill", "priority", "fair", "deadline", "mlfq", "hrrn"),
    *("latency_budget", "prefix_aged", "zoo.sjf", "zoo.srpt"),
]
QUIET_EVERY = 30.0  # seconds
CHANGE_EVERY = 3.0  # seconds between what an operator does
MOST_UNFINISHED = 40


class Soak:
    """One vLLM, what was sent to it, and what came back."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.engine, self.dice = llm, llm.llm_engine, random.Random(1)
        self.load = inside.a_load(200, seed=7)
        self.known = [
            each._replace(params={"temperature": 0.0, "max_tokens": 12, "ignore_eos": True})
            for each in inside.a_load(12, seed=11)
        ]
        self.expected = [self._alone(each) for each in self.known]
        self.scheduler = exchange(llm, policy="chunked_prefill", check=True)
        self.free_at_start = self._num_free()
        self.unfinished: dict[str, int | None] = {}  # by id the place in `known`
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    def _alone(self, asked: Asked) -> list[int]:
        params = SamplingParams(**asked.params)
        [output] = self.llm.generate([{"prompt_token_ids": asked.prompt}], params, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    def _num_free(self) -> int:
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
            if dice.random() < 0.05:
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
        """Run one step of vLLM, and compare the replies that end in it with the expected ones."""
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
        """Switch the policy, pause, or reset the prefix cache, at random, as an operator may."""
        kind = self.dice.random()
        if kind < 0.7:
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
                print(f"{now - began:6.0f} s  {dict(self.counts)}", flush=True)
                quiet = time.monotonic() + QUIET_EVERY
        self.run_out()


@program.command(
    "soak", seconds=600.0, asynchronous=Opt(False, "plan a step while another one runs")
)
def soak(args: Args) -> tuple[dict[str, Any], int]:
    """Everything mixed: is what was taken given back?"""
    llm = make_engine(asynchronous=args.asynchronous, **inside.TIGHT)
    found = Soak(llm)
    found.run(args.seconds)
    stats: Any = found.scheduler.policy.make_stats()
    found.counts["preemptions"] = stats.num_preemptions
    for words in found.wrong:
        print(words)
    give_back(llm)
    core_of(llm).shutdown()
    return {"counts": found.counts, "wrong": found.wrong}, int(bool(found.wrong))


if __name__ == "__main__":
    program.main()
