"""What a trained model says in vLLM under its own scheduler and under aioserve's, reply by reply.

    python benchmarks/vllm_tokens.py            # 300 prompts, each kind of vLLM, in float32
    python benchmarks/vllm_tokens.py --kinds drafts --prompts 40

SmolLM2 (98 MB, fetched once) answers greedily: prompts that share prefixes and are split over
steps, a pool of KV blocks in which requests are preempted, clients that leave, three samples, JSON,
choices and patterns. First vLLM's scheduler is compared with itself, with the prompts in another
order, fewer seats and shorter steps: sums over a batch of another size are rounded in another way,
and two tokens that are nearly as likely may change places. Then aioserve's is compared with it.

A reply that differs is a tie if, alone in vLLM, the two tokens at which it parts are less than
`TIE` apart in log-probability. The exit status is 1 if anything else differs. The last line is
JSON.
"""

import json
import random
import sys
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from harness import ROOT, Args, Opt, Program

# Not this folder: numba, which vLLM's n-grams need, would take `coverage.py` for a package.
sys.path.append(str(ROOT))
sys.path.remove(str(Path(__file__).resolve().parent))
from tests.vllm.inside import (  # first: it says how vLLM is to start
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

from aioserve.config import ModelConfig
from aioserve.model_source.downloads import fetch
from aioserve.model_source.info import ModelInfo

program = Program(__doc__)

FOLDER = Path(__file__).parents[1] / "models" / "test" / "smollm2"
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


# The model, and what it is asked.


def model_directory() -> Path:
    """SmolLM2 as a directory of Hugging Face, written once from its GGUF file. Raises
    `AioserveError` where it cannot be fetched.
    """
    import torch
    from transformers import AutoTokenizer

    source = fetch("smollm2")
    if not (FOLDER / "tokenizer_config.json").exists():  # it is written last
        info = ModelInfo(ModelConfig(model=str(source)))
        module = info.source.load_module(
            torch.bfloat16, torch.device("cpu"), "sdpa", keeps_blocks=False
        )
        module.save_pretrained(FOLDER)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        tokenizer.save_pretrained(FOLDER)
    return FOLDER


SYSTEMS = (
    "You are a helpful assistant. Answer in one short sentence.",
    "You are a patient teacher. A child of ten asks you something. Explain it in plain words, give "
    "one example from everyday life, and never use a word that a child of ten does not know.",
    "You write for the almanac of a small harbour town. The readers are fishermen, farmers and "
    "their families; they like facts, numbers and a dry joke. Every entry begins with a capital "
    "letter, names the month in which it matters, and ends with a piece of advice. Do not mention "
    "cities, do not mention machines, and keep to three sentences. If a thing is not known in the "
    "town, say what it resembles, and who might have brought it there.",
    "The following is a conversation with a clerk of the royal archive. The clerk knows every "
    "letter that was ever sealed in it, and quotes from them freely.\n"
    "Visitor: How old is the archive?\n"
    "Clerk: The first letter was sealed in the year of the long winter, when the river froze to "
    "its bed and the millers went home. It is a letter about flour.\n"
    "Visitor: And the newest?\n"
    "Clerk: It came this morning, and it is about flour as well.\n"
    "Visitor: What else is there?\n"
    "Clerk: Wills, maps, two songs, a list of bridges with the names of those who fell from them, "
    "and a recipe that nobody has dared to follow since the kitchen burned.\n",
)
TOPICS = (
    "the moon",
    "the sea",
    "bread",
    "a bicycle",
    "rain",
    "the city of Paris",
    "a cat",
    "the number seven",
    "iron",
    "a library",
    "the alphabet",
    "winter",
    "a river",
    "salt",
    "music",
    "the heart",
    "a clock",
    "paper",
    "gold",
    "a bridge",
)
FORMS = (
    "What is {}?",
    "Tell me about {}.",
    "Why do people care about {}?",
    "Write two lines of verse about {}.",
    "List three facts about {}.",
    "How would you describe {} to somebody who has never heard of it?",
    "What was known about {} a thousand years ago, and what is known today?",
    "Compare {} with a mountain.",
    "Is {} older than writing?",
    "Give a short definition of {}.",
    "Begin a story with {}.",
    "Who needs {}, and when?",
    "Say something about {} that is false.",
    "What rhymes with {}?",
    "Ask me a question about {}.",
)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def a_load(count: int, tokenizer: Any, *, samples: bool) -> list[Asked]:
    """Questions behind one of four texts, no two alike; of every kind some requests."""
    dice = random.Random(3)
    questions = [form.format(topic) for form in FORMS for topic in TOPICS]
    dice.shuffle(questions)
    load = []
    for i in range(count):
        words = [
            {"role": "system", "content": dice.choice(SYSTEMS)},
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


def run_kind(
    kind: str, num_prompts: int, dtype: str, policy: str | None = None
) -> list[dict[str, Any]]:
    """Return the rows of one kind of vLLM. Raises `AssertionError` if aioserve's scheduler breaks a
    rule of the contract, or had to preempt nothing.
    """
    own, usual = KINDS[kind]
    policy = policy or usual
    settings = {"model": str(model_directory()), "dtype": dtype, **TIGHT, **own}
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
    prompts=300,
    kinds=Opt(list(KINDS), choices=KINDS),
    dtype=Opt("float32", choices=TIE),
    policy=Opt(str, "of aioserve's; by default each kind has one"),
)
def main(args: Args) -> tuple[dict[str, Any], int]:
    """Compare the schedulers, kind by kind."""
    columns = ("replies", "equal", "part at a tie", "others", "widest gap", "preempted", "cached")
    print(f"{'beside vLLM':14}{'':17}" + "".join(f"{name:>15}" for name in columns))
    results = []
    for kind in args.kinds:
        rows = run_kind(kind, args.prompts, args.dtype, args.policy)
        results += rows
        for row in rows:
            values = "".join(f"{row.get(name, ''):>15}" for name in columns)
            print(f"{kind:14}{row['run']:17}{values}", flush=True)
    return {"rows": results}, int(any(row["others"] for row in results))


if __name__ == "__main__":
    program.main()
