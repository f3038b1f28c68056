"""The command `cards`: which measured cards there are, what one takes, and files of ready ones.

Arguments in, words and files out.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from aioserve.errors import ConfigError
from aioserve.lab.arguments import add_output
from aioserve.lab.cards.measured import (
    EXTRA,
    Card,
    check_installed,
    databases,
    measured,
    models,
)
from aioserve.lab.cards.tables import TableStepTimes, write_tables
from aioserve.runner.step_times import (
    PROFILE_FOLDER,
    StepTimeSource,
    available_profiles,
    make_step_times,
)
from aioserve.scheduler.output import StepFeatures
from aioserve.support.arguments import Parser
from aioserve.support.files import write

#: The ready profiles, by name: those that `--ready` makes.
READY: Mapping[str, Card] = {
    **{
        f"{name}-llama-3.1-8b": Card(card=card, model="meta-llama/Meta-Llama-3.1-8B")
        for name, card in (
            ("a100", "a100_sxm"),
            ("b200", "b200_sxm"),
            ("h100", "h100_sxm"),
            ("h200", "h200_sxm"),
            ("l40s", "l40s"),
            ("rtx-pro-6000", "rtx_pro_6000_server"),
        )
    },
    **{
        f"h100x{tp}-llama-3.1-70b-fp8": Card(
            card="h100_sxm", model="nvidia/Llama-3.1-70B-Instruct-FP8", tp=tp
        )
        for tp in (2, 4)
    },
    "h100-qwen3-32b-fp8": Card(card="h100_sxm", model="Qwen/Qwen3-32B-FP8"),
    "h200x8-qwen3-235b-a22b-fp8": Card(
        card="h200_sxm", model="Qwen/Qwen3-235B-A22B-FP8", tp=8, ep=8
    ),
    "h200-llama-3.1-70b-fp8-trtllm": Card(
        card="h200_sxm", model="nvidia/Llama-3.1-70B-Instruct-FP8", engine="trtllm"
    ),
    "h200x8-deepseek-v3": Card(card="h200_sxm", model="deepseek-ai/DeepSeek-V3", tp=8, ep=8),
}
#: Steps whose times are shown: rows that decode, the context of each, and a prompt.
SHOWN = ((1, 1000, 0), (32, 1000, 0), (256, 1000, 0), (0, 0, 512), (0, 0, 8192), (64, 1000, 512))
BLOCK = 16  # tokens


def run_cards(words: Sequence[str]) -> int:
    """`aioserve cards`; returns the exit code. Raises `ConfigError`."""
    arguments = _parser().parse_args(words)
    given = [("model", arguments.card_model), ("tp", arguments.card_tp), ("ep", arguments.card_ep)]
    given += [
        (name, getattr(arguments, name))
        for name in ("engine", "version", "weights", "experts", "attention", "kv")
    ]
    options = {name: value for name, value in given if value is not None}
    if arguments.ready is not None:
        return _make_ready(Path(arguments.ready))
    if arguments.card is None:
        if options or arguments.output:
            raise ConfigError("give --card NAME; without one, cards lists what there is")
        _list()
        return 0
    if options:
        source = make_step_times("card", {"card": arguments.card, **options})
    else:
        source = make_step_times(arguments.card, {})
    _show(source)
    if arguments.output is not None:
        if not isinstance(source, TableStepTimes):
            raise ConfigError(f"{arguments.card} has no tables to write: give --card-model")
        head = "Made by: python -m aioserve cards " + " ".join(words)
        write(arguments.output, write_tables(source.options, head).encode())
    return 0


def _parser() -> Parser:
    parser = Parser(
        "cards",
        description="List measured cards and ready profiles, or show what the steps of one take.",
    )
    parser.add_argument("--card", metavar="NAME", help="a ready profile, or a card of the package")
    parser.add_argument("--card-model", metavar="MODEL", help="its name on a hub or config.json")
    parser.add_argument("--card-tp", type=int, metavar="N", help="cards that share each layer")
    parser.add_argument("--card-ep", type=int, metavar="N", help="of these, that share out experts")
    parser.add_argument("--engine", metavar="NAME", help="vllm (the default), sglang or trtllm")
    parser.add_argument("--version", metavar="X", help="of the engine (default: the newest whole)")
    parser.add_argument("--weights", metavar="TYPE", help="element type of matrix products")
    parser.add_argument("--experts", metavar="TYPE", help="element type of experts (default: same)")
    parser.add_argument(
        "--attention",
        metavar="TYPE",
        help="element type of projections of attention (default: same)",
    )
    parser.add_argument("--kv", metavar="TYPE", help="element type of the KV cache")
    add_output(parser, "-o", "--output", help="write the profile to this file", metavar="FILE.yaml")
    parser.add_argument(
        "--ready", metavar="FOLDER", help="make the ready profiles anew, as files in this folder"
    )
    return parser


def _list() -> None:
    print("ready profiles, which need no package:")
    for name in available_profiles():
        source = make_step_times(name, {})
        if source.machine:
            print(f"  {name:30}  {source.machine}")
    try:
        check_installed()
    except ConfigError as error:
        print(error)
        return
    print(f"cards of {EXTRA}, with the engines and versions under which they were measured:")
    for card, engines in sorted(databases().items()):
        said = "; ".join(f"{e} {', '.join(versions)}" for e, versions in sorted(engines.items()))
        print(f"  {card:30}  {said}")
    print("models, beside any config.json:")
    print("  " + "\n  ".join(models()))


def _show(source: StepTimeSource) -> None:
    """Print what the source is of, and what some steps take."""
    for line in (source.machine, source.source, source.error, source.errors_of_runs()):
        print(line)
    came = f", {source.host}" if source.host else ""
    print(f"host: {source.rates.host_ms:g} ms a step{came}")
    for rows, context, tokens in SHOWN:
        prefills = [(tokens, tokens)] if tokens else []
        features = StepFeatures.of(rows, rows * context + tokens, prefills)
        said = [f"{rows} decode{'s' * (rows > 1)} at {context:,} tokens"] if rows else []
        said += [f"a prompt of {tokens:,}"] if tokens else []
        print(f"  {' and '.join(said):46} {1e3 * source.seconds(features, prefills):9.2f} ms")
    held = source.num_kv_tokens(2048, 256)
    if held is not None:
        print(f"  KV cache: {held:,} tokens, {held // BLOCK:,} blocks of {BLOCK}")


def _make_ready(folder: Path) -> int:
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}")
    for name, card in READY.items():
        text = write_tables(
            measured(card), f"{card.words}. Made by: python -m aioserve cards --ready"
        )
        write(str(folder / f"{name}.yaml"), text.encode())
        made = make_step_times(str(folder / f"{name}.yaml"), {})
        print(f"{name}: {made.error}; {len(text):,} bytes", flush=True)
    if folder.resolve() != PROFILE_FOLDER.resolve():
        print(f"to ship them, copy them to {PROFILE_FOLDER}")
    return 0
