"""The command `calibrate`: measure a real model here, fit a step-time model, write a profile.

Arguments in, words out; what is measured and how is `calibrate`.
"""

import asyncio
import json
from collections.abc import Sequence
from contextlib import ExitStack

import msgspec

from aioserve.arguments import Parser
from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.lab.arguments import add_json, add_output, add_settings, wants_json
from aioserve.lab.calibration.measurement import calibrate, measure, write_profile
from aioserve.lab.terminal import progress


def run_calibrate(argv: Sequence[str]) -> int:
    """`python -m aioserve calibrate [-o FILE]`; returns the exit code. Raises `ConfigError`."""
    parser = Parser(
        "calibrate",
        description="Run a designed set of batches on a real model and fit what a step takes. "
        "Simulated runs use the result with --set runner.profile=FILE.",
        epilog="A minute and a half with the embedded model. Where stdout is no terminal, the last "
        "line is JSON.",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings, as for serve")
    parser.add_argument(
        "--model", help="model to measure, as for serve (default: the embedded model)"
    )
    add_settings(parser)
    add_output(parser, "-o", "--output", help="file to write the profile to", metavar="FILE.yaml")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="measure a third of the loads: a faster, rougher profile",
    )
    add_json(parser)
    args = parser.parse_args(argv)
    overrides = list(args.set)
    if args.model is not None:
        overrides.append(("model.model", args.model))
    if args.output is not None and not args.output.endswith((".yaml", ".yml")):
        raise ConfigError(f"a profile must be a .yaml file, got {args.output}")
    config = EngineConfig.load(args.config, overrides)
    with ExitStack() as stack:
        measured = asyncio.run(
            measure(
                config,
                lambda total: stack.enter_context(progress(total, "loads", "Measuring loads")),
                is_quick=args.quick,
            )
        )
    model = calibrate(measured)
    for name, value in msgspec.structs.asdict(model).items():
        print(f"{name:20} {value:.4g}" if isinstance(value, float) else f"{name:20} {value}")
    if args.output is not None:
        write_profile(model, args.output)
        print(f"written to {args.output}")
    if wants_json(args):
        print(json.dumps(msgspec.to_builtins(model)))
    return 0
