"""Tokens per second of `vllm serve` under its own scheduler and under aioserve's, in one run.

    python benchmarks/vllm_servers.py                      # W5 and W6, a quiet machine, 15 minutes
    python benchmarks/vllm_servers.py --loads W6 --rounds 1 --max-seconds 60

Two servers of one model run at once and take turns, so that one of them idles: W5 on SmolLM2, W6
on the embedded model, of which a step takes so little that the scheduler counts. Both have the same
seats, step tokens and KV blocks; aioserve's policy is `chunked_prefill` with all tokens of a step,
which is vLLM's own order. The loads are those of `peers.py`, and so is the table: the ratio is to
vLLM's own scheduler. Runs in vLLM's environment. The last line is JSON.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from build_peers import vllm
from harness import ROOT, Args, Opt, Program, serving
from peers import compare_running

from aioserve.config import ModelConfig
from aioserve.model_source.info import find_model

STEP_TOKENS = 2048
OURS = {"policy": "chunked_prefill", "options": {"chunk_size": STEP_TOKENS}}
#: Seats of each load's server: as many as it has streams.
SEATS = {"W5": 64, "W6": 256}


def model_of(load: str) -> Path:
    """The directory of the model that a load is meant for."""
    if load == "W6":
        return find_model(ModelConfig()).path
    from vllm_tokens import model_directory

    return model_directory()


def words_of(load: str, *, is_ours: bool) -> list[str]:
    """The command line of one server."""
    program = str(Path(sys.executable).with_name("vllm"))
    words = [program, "serve", str(model_of(load)), "--port", "{port}", "--dtype", "bfloat16"]
    words += ["--max-model-len", "1024", "--max-num-seqs", str(SEATS[load])]
    words += ["--max-num-batched-tokens", str(STEP_TOKENS)]
    if is_ours:
        words += ["--scheduler-cls", "aioserve.vllm.Scheduler"]
        words += ["--additional-config", json.dumps({"aioserve": OURS})]
    return words


program = Program(__doc__)


@program.command(
    loads=Opt(["W5", "W6"], choices=SEATS),
    rounds=3,
    max_seconds=Opt(300.0, "of one load"),
)
def main(args: Args) -> tuple[dict[str, Any], int]:
    """Start two servers for each load, and compare them."""
    environment = {**os.environ, **dict(vllm().environment), "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    results: dict[str, Any] = {}
    code = 0
    for load in args.loads:
        with contextlib.ExitStack() as stack:
            running = {
                name: stack.enter_context(
                    serving(
                        program=words_of(load, is_ours=is_ours),
                        ready="/health",
                        env=environment,
                        patience=1800.0,
                    )
                )
                for name, is_ours in (("vLLM", False), ("aioserve", True))
            }
            asked = Args(**vars(args))
            asked.loads = [load]
            asked.peers = [f"{name}={server.url}" for name, server in running.items()]
            found, failed = compare_running(asked)
            results |= found
            code = max(code, failed)
    return results, code


if __name__ == "__main__":
    program.main()
