"""What speculation is worth: tokens per second with it against without, in turns.

    python benchmarks/speculation.py rewrite [--streams 1 4 16] [--rounds 3]
    python benchmarks/speculation.py chat [--draft-model SMALL] [--temperature 0]
    python benchmarks/speculation.py code --model models/test/qwen.gguf
    python benchmarks/speculation.py wrong     # simulated, all guesses wrong
    python benchmarks/speculation.py mtp [--models llama qwen3_5_text glm4_moe] [--streams 1 4]

`rewrite` asks for a piece of this repository's code again, with one name changed: what a coding
assistant does. Greedy. `chat` asks a short question and samples at temperature 1: little stands in
the text that could come again, so this shows what guessing costs where it does not pay. `code` asks
for a new program, greedy. Two engines in this process, one with `--method` and one without, take
turns on the same prompts; no prompt comes twice, so none is known from an earlier round. As many
tokens each. Medians of the rounds, and of the ratios of each; of processor time as well, which
other processes disturb less; and how many replies are equal, token for token. `--method none` shows
what two equal engines differ by.

`mtp`: what drafts of an MTP layer gain at most, and cost where all are wrong, beside no drafts.
Random weights, 1,024 wide: the outputs of all layers are zero, so that the next token follows from
the newest one alone, which an MTP layer that hands the token on knows; no step is cheaper by that.
How often a published layer is right is not shown. The last line is JSON.
"""

import asyncio
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import ROOT, Args, Opt, Program
from safetensors.torch import load_file, save_file
from torch import Tensor

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import (
    CacheConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from aioserve.lab.simulation.run import simulate
from aioserve.lab.workloads.synthetic import (
    ClientClass,
    ClosedLoop,
    Constant,
    WorkloadSpec,
    generate,
)

program = Program(__doc__)

LINES = 30  # of code in a prompt
CODE = (
    *("Write a Python module for {} with tests.", "Implement {} in C, with error handling."),
    *("Write a class for {} in Java.", "Show three ways to do {} in Python, and compare them."),
    *("Write a shell script for {}.", "Write a JavaScript function for {}, with examples."),
)
PROGRAMS = (
    *(
        "a binary heap",
        "parsing CSV files",
        "matrix multiplication",
        "a thread pool",
        "an LRU cache",
    ),
    *(
        "Dijkstra's algorithm",
        "reading log files",
        "a bank account",
        "counting words",
        "a linked list",
    ),
    *(
        "sorting by several keys",
        "an HTTP client",
        "a tic-tac-toe board",
        "a bloom filter",
        "a stack",
    ),
    *(
        "a rate limiter",
        "roman numerals",
        "a trie",
        "JSON validation",
        "a priority queue",
        "a timer",
    ),
)
REWRITE = "Write this code again, with `self` renamed to `this`:\n```\n{}\n```"
CHAT = (
    *("Tell me about {}.", "Why do people like {}?", "Write a letter to a friend about {}."),
    *("What would you ask an expert on {}?", "Invent a story in which {} matters."),
    *("Describe {} to a child.", "What changed with {} in a hundred years?"),
    *("Plan an evening around {}.", "Who should not care for {}, and why?"),
)
SUBJECTS = (
    *("bees", "old maps", "night trains", "sourdough", "chess", "volcanoes", "umbrellas", "jazz"),
    *("lighthouses", "bicycles", "the moon", "tea", "glaciers", "libraries", "kites", "salt"),
    *("owls", "bridges", "marathons", "soap", "comets", "gardens", "violins", "paper", "deserts"),
    *("harbours", "clocks", "mushrooms", "rain", "markets", "whales", "bread", "islands", "wool"),
)


def excerpts() -> list[str]:
    """Pieces of our own code, each once."""
    found = []
    for path in sorted((ROOT / "aioserve").rglob("*.py")):
        lines = path.read_text(encoding="utf-8").splitlines()
        pieces = [lines[at : at + LINES] for at in range(0, len(lines) - LINES, LINES)]
        found += ["\n".join(piece) for piece in pieces]
    return found


@program.command("wrong")
def simulate_wrong(args: Args) -> None:
    """The speed with guesses for everybody in every step, all of them wrong, to that without."""
    for profile, clients in itertools.product(("example", "embedded-cpu"), (1, 4, 16, 64)):
        kind = ClientClass(
            name="c", prompt=Constant(value=60), output=Constant(value=200), draft_acceptance=0.0
        )
        spec = WorkloadSpec(
            classes=[kind], arrivals=ClosedLoop(clients=clients), num_requests=12 * clients
        )
        seconds = []
        for num_drafts in (0, 8):
            runner = RunnerConfig(
                runner="simulated", profile=profile, simulated_draft_tokens=num_drafts
            )
            config = EngineConfig(runner=runner, scheduler=SchedulerConfig(max_num_seqs=64))
            seconds.append(simulate(config, generate(spec)).end)
        print(f"{profile:14} {clients:3} requests at a time: {seconds[0] / seconds[1]:.3f} times")


def questions(task: str) -> list[str]:
    """Of one task, each once."""
    if task == "rewrite":
        return [REWRITE.format(text) for text in excerpts()]
    if task == "code":
        return [question.format(program) for question in CODE for program in PROGRAMS]
    return [question.format(subject) for question in CHAT for subject in SUBJECTS]


async def start(args: Args, speculation: SpeculationConfig) -> AsyncEngine:
    model = ModelConfig(model=args.model, max_model_len=2048, dtype=args.dtype)
    engine = AsyncEngine(EngineConfig(model=model, speculation=speculation))
    await engine.__aenter__()
    return engine


class Speed(NamedTuple):
    """Of one batch."""

    tokens_per_second: float
    cpu_seconds: float
    replies: list[list[int]]  # token ids


async def measure(
    engine: AsyncEngine, batch: list[str], num_tokens: int, temperature: float
) -> Speed:
    async def one(seed: int, question: str) -> list[int]:
        params = SamplingParams(
            max_tokens=num_tokens, temperature=temperature, seed=seed, ignore_eos=True
        )
        stream = await engine.add_request([{"role": "user", "content": question}], params)
        return [token_id async for output in stream for token_id in output.token_ids]

    begin, cpu_begin = time.perf_counter(), time.process_time()
    replies = await asyncio.gather(*(one(seed, text) for seed, text in enumerate(batch)))
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
    return Speed(len(batch) * num_tokens / seconds, cpu_seconds, replies)


def drafted(engine: AsyncEngine) -> tuple[int, int]:
    """Tokens that were guessed so far, and of these the right ones."""
    stats = engine.get_stats()
    assert stats is not None
    return stats.num_draft_tokens, stats.num_accepted_tokens


async def compare_tasks(task: str, args: Args) -> dict[str, Any]:
    """Two engines on the questions of a task."""
    off = await start(args, SpeculationConfig())
    method: Any = "draft" if args.draft_model else args.method
    speculation = SpeculationConfig(speculative_method=method, draft_model=args.draft_model)
    on = await start(args, speculation)
    texts, result = iter(questions(task)), {}
    temperature = args.temperature
    for engine in (off, on):
        await measure(engine, [next(texts)], 20, temperature)
    for streams in args.streams:
        rounds, before = [], drafted(on)
        for number in range(args.rounds):
            batch = [next(texts) for _ in range(streams)]
            order = [("off", off), ("on", on)][:: -1 if number % 2 else 1]
            rounds.append({n: await measure(e, batch, args.tokens, temperature) for n, e in order})
        found = {
            name: statistics.median(r[name].tokens_per_second for r in rounds)
            for name in ("off", "on")
        }
        ratios = [r["on"].tokens_per_second / r["off"].tokens_per_second for r in rounds]
        found["ratio"] = statistics.median(ratios)
        cpu = [r["on"].cpu_seconds / r["off"].cpu_seconds for r in rounds]
        found["cpu_ratio"] = statistics.median(cpu)
        num_drafts, num_right = (now - then for now, then in zip(drafted(on), before, strict=True))
        num_tokens = args.rounds * streams * args.tokens
        replies = [
            both for r in rounds for both in zip(r["on"].replies, r["off"].replies, strict=True)
        ]
        found["equal_replies"] = sum(own == other for own, other in replies) / len(replies)
        found["wrong_share"] = (num_drafts - num_right) / num_tokens
        result[streams] = {name: round(value, 3) for name, value in found.items()}
        print(
            f"{streams:3} streams: {found['off']:7.1f} tokens/s without, {found['on']:7.1f} "
            f"with, {found['ratio']:.2f} times; processor time {found['cpu_ratio']:.2f} "
            f"times ({' '.join(f'{ratio:.2f}' for ratio in ratios)};"
            f" {' '.join(f'{ratio:.2f}' for ratio in cpu)}); of {num_drafts} guessed tokens "
            f"{num_right} were right, of {num_tokens} in all; {found['equal_replies']:.0%} of the "
            "replies are equal",
            flush=True,
        )
    num_drafts, num_right = drafted(on)
    for engine in (off, on):
        await engine.__aexit__(None, None, None)
    accepted = round(num_right / max(num_drafts, 1), 2)
    return {"streams": result, "accepted": accepted}


TASK: dict[str, Any] = {
    "model": "smollm2",
    "streams": [1, 4, 16],
    "rounds": 3,
    "tokens": 200,
    "draft_model": str,
    "method": Opt("auto", choices=["auto", "ngram", "none"]),
    "dtype": "auto",
    "temperature": 0.0,
}


@program.command("rewrite", **TASK)
async def rewrite(args: Args) -> dict[str, Any]:
    """Code again, with one name changed."""
    return await compare_tasks("rewrite", args)


@program.command("code", **TASK)
async def code(args: Args) -> dict[str, Any]:
    """Code that is new: how often it repeats itself is up to the model."""
    return await compare_tasks("code", args)


@program.command("chat", **TASK | {"temperature": 1.0})
async def chat(args: Args) -> dict[str, Any]:
    """Measure drafts on short questions with sampled replies."""
    return await compare_tasks("chat", args)


# MTP layers.


COMMON: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},  # served fused; no published one has an MTP layer
    "qwen3_5_text": {
        "linear_num_value_heads": 16,
        "linear_num_key_heads": 8,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "glm4_moe": {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024},
}
NUM_TOKENS = 128
OUTPUTS = ("o_proj.weight", "down_proj.weight", "out_proj.weight")


class Measured(NamedTuple):
    """One run of some streams."""

    seconds: float
    cpu_seconds: float
    num_steps: int
    num_drafts: int
    num_right: int


def write_model(kind: str, path: Path, *, is_right: bool) -> None:
    """A model with an MTP layer, under the names of GLM and DeepSeek, or of Qwen."""
    fields, is_qwen = COMMON | MODELS[kind], kind.startswith("qwen")
    one = fields | {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    if is_qwen:
        one["layer_types"] = ["full_attention"]
    weights, layer = _weights(kind, path, fields), _weights(kind, path / "layer", one)
    prefix = "mtp." if is_qwen else "model.layers.8."
    inner = f"{prefix}layers.0." if is_qwen else prefix
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    if not is_qwen:
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    norm = weights["model.norm.weight"]
    project = torch.eye(1024, 2048, dtype=norm.dtype)  # the token's half of what it is given
    parts = (norm, norm, project if is_right else project.flip(0), norm)
    own = {f"{prefix}{name}.weight": part.clone() for name, part in zip(names, parts, strict=True)}
    own |= {
        inner + name.removeprefix("model.layers.0."): weight
        for name, weight in layer.items()
        if name.startswith("model.layers.0.")
    }
    save_file(weights | own, path / "model.safetensors", {"format": "pt"})


def _weights(kind: str, path: Path, fields: dict[str, Any]) -> dict[str, Tensor]:
    """Those of a random model, whose layers add nothing; `path` gets its configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    weights: dict[str, Tensor] = load_file(path / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(OUTPUTS):
            weight.zero_()
    return weights


async def measure_drafts(engine: AsyncEngine, num_streams: int) -> Measured:
    """Greedy replies to short prompts, at once."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, detokenize=False)

    async def one(number: int) -> None:
        async for _ in engine.generate([100 + number, 200 + number, 300], params):
            pass

    before, started, cpu_started = engine.get_stats(), time.perf_counter(), time.process_time()
    await asyncio.gather(*map(one, range(num_streams)))
    seconds, after = time.perf_counter() - started, engine.get_stats()
    assert before is not None
    assert after is not None
    return Measured(
        seconds,
        time.process_time() - cpu_started,
        after.num_steps - before.num_steps,
        after.num_draft_tokens - before.num_draft_tokens,
        after.num_accepted_tokens - before.num_accepted_tokens,
    )


async def compare_drafts(kind: str, folder: Path, args: Args) -> list[dict[str, Any]]:
    """A row for each number of streams, and for right and wrong drafts."""
    engines = {}
    for name in ("right", "wrong"):
        write_model(kind, folder / name, is_right=name == "right")
    for name in ("none", "right", "wrong"):
        speculation = SpeculationConfig(speculative_method="mtp")
        config = EngineConfig(
            model=ModelConfig(
                model=str(folder / ("right" if name == "none" else name)), skip_tokenizer_init=True
            ),
            cache=CacheConfig(kv_cache_gib=0.5, enable_prefix_caching=False),
            speculation=SpeculationConfig() if name == "none" else speculation,
        )
        engines[name] = AsyncEngine(config)
        await engines[name].start()
        for num_streams in (1, *args.streams):  # what drafts cost is learned
            await measure_drafts(engines[name], num_streams)
    rows = []
    for num_streams in args.streams:
        rounds = [
            {name: await measure_drafts(engine, num_streams) for name, engine in engines.items()}
            for _ in range(args.rounds)
        ]
        for name in ("right", "wrong"):
            drafts = sum(found[name].num_drafts for found in rounds)
            row = {
                "model": kind,
                "streams": num_streams,
                "drafts": name,
                "speed": statistics.median(f["none"].seconds / f[name].seconds for f in rounds),
                "cpu": statistics.median(
                    f[name].cpu_seconds / f["none"].cpu_seconds for f in rounds
                ),
                "steps": statistics.median(f[name].num_steps / f["none"].num_steps for f in rounds),
                "num_drafts": drafts,
                "accepted": sum(f[name].num_right for f in rounds) / max(drafts, 1),
            }
            rows.append(row)
            print(
                f"{kind}, {num_streams} streams, {name} drafts: {row['speed']:.2f} times the speed "
                f"without, {row['cpu']:.2f} times the processor time, {row['steps']:.2f} times the "
                f"steps; {row['accepted']:.0%} of {drafts} drafts accepted",
                flush=True,
            )
    for engine in engines.values():
        await engine.shutdown()
    return rows


@program.command("mtp", models=Opt(list(MODELS), choices=MODELS), streams=[1, 4], rounds=3)
def mtp(args: Args) -> dict[str, Any]:
    """Drafts of an MTP layer, right and wrong ones."""
    rows = []
    for kind in args.models:
        with tempfile.TemporaryDirectory() as folder:
            rows += asyncio.run(compare_drafts(kind, Path(folder), args))
    return {"rows": rows}


if __name__ == "__main__":
    program.main()
