"""A second witness for GGUF files: the greedy tokens of llama.cpp beside those of `transformers`.

    python -m tests.gguf_witness [NAME...]    names of tests.gguf_written, by default all

Needs the llama-server that `make bench-peers` builds. The files are tiny, in float32, with unusual
values; a line for each says for how many of four prompts all tokens are equal.
"""

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.gguf_models import END_OF_TURN, EOS
from tests.gguf_written import WRITTEN, make_written

SERVER = Path(__file__).parents[1] / ".venv" / "peers" / "llama.cpp" / "llama-server"
START_SECONDS = 30
NUM_TOKENS = 8
_OPTIONS = (
    *("-c", "512", "-np", "1", "-t", "1", "-tb", "1", "--no-warmup", "--no-webui"),
    *("--cache-type-k", "f32", "--cache-type-v", "f32", "-fa", "off"),
)


class NotLoadedError(Exception):
    """llama.cpp does not load the file; says why."""


@contextmanager
def served(path: Path) -> Iterator[str]:
    """The address of a llama-server that has loaded the file. Raises `NotLoadedError`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = path.with_suffix(".log")
    command = [SERVER, "-m", path, "--host", "127.0.0.1", "--port", str(port), *_OPTIONS]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
        while process.poll() is None and time.monotonic() < end:
            with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2):
                break
            time.sleep(0.2)
        else:
            errors = [line for line in log.read_text().splitlines() if "error" in line]
            raise NotLoadedError(errors[0] if errors else "it has crashed")
        yield url
    finally:
        process.kill()
        process.wait()


def tokens(url: str, prompt: list[int]) -> list[int]:
    """Greedy tokens of the server; it gives none that ends a reply."""
    asked = {
        "prompt": prompt,
        "n_predict": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_tokens": True,
        "cache_prompt": False,
    }
    request = urllib.request.Request(
        f"{url}/completion", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        found: list[int] = json.load(response)["tokens"]
    return found


def expected(directory: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of `transformers`, without those that end a reply."""
    module: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    module.generation_config.eos_token_id = None
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=0,
            suppress_tokens=[EOS, END_OF_TURN],
        )
        found.append(output[0, len(prompt) :].tolist())
    return found


def main(names: list[str]) -> None:
    """Print a line for each file."""
    random = torch.Generator().manual_seed(5)
    prompts = [torch.randint(10, 250, (n,), generator=random).tolist() for n in (1, 5, 20, 45)]
    for name in names or list(WRITTEN):
        with tempfile.TemporaryDirectory() as folder:
            directory, path = make_written(WRITTEN[name], Path(folder))
            wanted = expected(directory, prompts)
            try:
                with served(path) as url:
                    found = [tokens(url, prompt) for prompt in prompts]
            except NotLoadedError as error:
                said = f"not loaded: {error}"
            else:
                equal = [a == b for a, b in zip(found, wanted, strict=True)]
                said = f"{sum(equal)} of {len(equal)}"
        print(f"{name:24} {WRITTEN[name].architecture:16} {said:.150}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
