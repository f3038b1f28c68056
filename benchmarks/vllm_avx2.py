"""vLLM's command line, told that this CPU has neither AVX-512 nor AMX: for `peers.py --held avx2`.

    .venv/peers/vllm/bin/python benchmarks/vllm_avx2.py serve MODEL

vLLM asks torch what the CPU can do, and no variable holds the answer. Told this, it loads the
library that its wheel has for AVX2; oneDNN and torch's own code are held by variables (`HELD` in
`build_peers.py`). Processes that it spawns run this file again, and are told the same.
"""

import functools
import sys

import torch

_found = torch.cpu.get_capabilities()
_held = {name: value for name, value in _found.items() if not name.startswith(("avx512", "amx"))}
torch.cpu.get_capabilities = functools.cache(lambda: _held)

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.exit(main())
