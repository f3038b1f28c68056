"""The command `calibrate`: fit a step-time model to a real model here, or to outcomes of a server.

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
from aioserve.runner.profile import StepTimeModel


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
    parser.add_argument(
        "--outcomes",
        nargs="+",
        metavar="CSV",
        help="fit to what another server did instead: files with the columns arrival_s, client, "
        "prompt_tokens, output_tokens, ttft_s and latency_s, one row per request, of a server that "
        "runs prompts in steps of their own (LightLLM, S-LoRA, vLLM without chunked prefill)",
    )
    add_json(parser)
    args = parser.parse_args(argv)
    overrides = list(args.set)
    if args.model is not None:
        overrides.append(("model.model", args.model))
    if args.output is not None and not args.output.endswith((".yaml", ".yml")):
        raise ConfigError(f"a profile must be a .yaml file, got {args.output}")
    if args.outcomes is not None:
        if args.quick or args.config is not None or overrides:
            raise ConfigError(
                "--outcomes fits to files: give no model, settings or --quick with it"
            )
        model = _fit(args.outcomes)
    else:
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


def _fit(paths: Sequence[str]) -> StepTimeModel:
    """Fit to the outcomes in files, and print what is each file's own."""
    from aioserve.lab.outcomes.fit import fit_outcomes
    from aioserve.lab.outcomes.reader import read_outcomes

    logs = [read_outcomes(path) for path in paths]
    num_requests = sum(map(len, logs))
    model, sessions = fit_outcomes(logs, f"fitted to {num_requests} outcomes of another server")
    for path, session in zip(paths, sessions, strict=True):
        print(
            f"{path}: runner.step_host_factor {session.host_factor:.4g}, runner.step_cold_ms "
            f"{session.cold_ms:.4g}, error of decodes {session.error:.2%}"
        )
    return model
