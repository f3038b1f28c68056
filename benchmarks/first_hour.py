"""The first hour with aioserve, walked as a newcomer walks it, with the time of each step.

    python benchmarks/first_hour.py [--folder DIR] [--only serve chat ...] [--port 8000]

Clones this repository as it is committed into a new folder, and there follows the README: set up,
serve the embedded model, ask it, serve SmolLM2 and ask it ten questions twenty times each (with a
table of the answers that were right and of those that their limit cut off), try another policy
until there is a verdict, compare two. The last line is JSON.
"""

import json
import os
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
from harness import ROOT, TEXTS, Args, Opt, Program

TIMES = 20  # that each question is asked
PATIENCE = 900.0  # seconds for a step
KEY = "sk-first-hour-operator-0123456789"
QUESTIONS = TEXTS["answers"]  # as of the model's test, tests/server/test_real_model.py


program = Program(__doc__)


class Hour:
    """One walk: a folder with a clone in it, and a port to serve on."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.clone, self.url = folder, folder / "aioserve", f"http://127.0.0.1:{port}"
        self.port = port
        self.environ = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}

    def run(self, *words: str | Path, cwd: Path | None = None) -> str:
        """What a command prints. Raises `CalledProcessError`."""
        done = subprocess.run(
            list(map(str, words)),
            cwd=cwd or self.clone,
            env=self.environ,
            check=True,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PATIENCE,
        )
        return done.stdout

    @contextmanager
    def serving(self, *words: str, ready: str = "/ready") -> Iterator[float]:
        """A command that serves inside the block; yields the seconds until it does. It ends by
        Ctrl-C, without an error.
        """
        options: dict[str, Any] = {"cwd": self.clone, "env": self.environ, "patience": PATIENCE}
        options |= {"port": self.port, "log": self.folder / "server.log", "end": signal.SIGINT}
        with harness.serving(program=words, ready=ready, **options) as server:
            yield server.start_seconds
        if server.process.returncode and words[0] != "make":  # which ends by the signal itself
            code = server.process.returncode
            raise RuntimeError(f"{' '.join(words)} ended with {code} after Ctrl-C")

    def post(self, path: str, **fields: Any) -> Any:
        """The answer to a body, asked as an operator."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        body = json.dumps(fields).encode()
        request = urllib.request.Request(f"{self.url}{path}", body, headers)
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            return json.load(response)

    def ask(self, question: tuple[str, str]) -> tuple[str, bool, bool]:
        """A question, whether the answer has the right word, and whether its limit cut it."""
        text, word = question
        message = {"role": "user", "content": text}
        said = self.post("/v1/chat/completions", model="smollm2", messages=[message])
        choice = said["choices"][0]
        return text, word in choice["message"]["content"], choice["finish_reason"] == "length"

    def complete(self, number: int) -> None:
        """One of some mixed requests."""
        self.post(
            "/v1/completions",
            model="embedded",
            prompt=f"{number * 7919 % 1009} " + "What news? " * (1 + number % 7 * 20),
            max_tokens=20 + number % 5 * 40,
            user=("ann", "bob", "cid")[number % 3],
        )

    def crowd(self, count: int) -> None:
        """Mixed requests, sixteen at a time."""
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(self.complete, range(count)))


def clone(hour: Hour) -> str:
    """git clone, as the README begins."""
    hour.run("git", "clone", "-q", ROOT, hour.clone, cwd=hour.folder)
    return hour.run("git", "log", "-1", "--format=%h %s").strip()


def set_up(hour: Hour) -> str:
    """What `make serve` does before it serves: an environment, packages, kernels."""
    hour.run("make", "install")
    return f"{len(hour.run('.venv/bin/pip', 'list', '--format=freeze').splitlines())} packages"


def serve(hour: Hour) -> str:
    """The README's first command and its curl, then the same once more."""
    seconds, texts = [], []
    for _ in range(2):
        with hour.serving("make", "serve", f"ARGS=--port {hour.port}") as ready:
            seconds.append(ready)
            message = {"role": "user", "content": "What news, my lord?"}
            fields = {"model": "embedded", "temperature": 0.7, "seed": 9, "messages": [message]}
            answer = hour.post("/v1/chat/completions", **fields)
            texts.append(answer["choices"][0]["message"]["content"])
    assert texts[0] == texts[1]
    return f"ready after {seconds[0]:.1f} s, then {seconds[1]:.1f} s: {texts[0]!r}"


def chat(hour: Hour) -> str:
    """Ask SmolLM2 each question twenty times, sampled as for a client that states nothing."""
    seconds: list[float] = []
    found: list[tuple[str, bool, bool]] = []
    for asked in ([*QUESTIONS.items()] * TIMES, []):  # the second start finds what the first kept
        words = ("make", "serve", "MODEL=smollm2", f"ARGS=--port {hour.port}")
        with hour.serving(*words) as ready, ThreadPoolExecutor(16) as pool:
            seconds.append(ready)
            found += pool.map(hour.ask, asked)
    print(f"\n{'question':50} right of {TIMES}  cut off")
    for question in QUESTIONS:
        own = [(is_right, is_cut) for name, is_right, is_cut in found if name == question]
        right, cut = map(sum, zip(*own, strict=True))
        print(f"{question:50} {right:11} {cut:8}")
    print(flush=True)
    right, cut = sum(row[1] for row in found), sum(row[2] for row in found)
    told = f"ready after {seconds[0]:.1f} s with its download, then {seconds[1]:.1f} s"
    return f"{told}; {right} of {len(found)} answers right, {cut} cut by their limit"


def try_policy(hour: Hour) -> str:
    """Another policy on the same traffic, until there is a verdict."""
    keys = hour.folder / "keys.yaml"
    keys.write_text(f"keys: [{{name: me, key: {KEY}, admin: true}}]\n")
    keys.chmod(0o600)
    words = ("--port", str(hour.port), "--enable-admin", "--api-keys-file", str(keys))
    served = hour.serving(".venv/bin/python", "-m", "aioserve", *words)
    with served, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(hour.post, "/admin/try_policy", policy="fcfs")
        while not asked.done():
            hour.crowd(64)
        report = asked.result()
    intervals = "with" if report["has_intervals"] else "without"
    return f"{intervals} intervals for other requests: {report['on_these_requests'][0]}"


def compare(hour: Hour) -> str:
    """Two policies on one workload, in virtual time."""
    configs = ("configs/fcfs.yaml", "configs/chunked_prefill.yaml")
    words = (*configs, "--workload", "configs/workloads/mixed.yaml")
    printed = hour.run(".venv/bin/python", "-m", "aioserve", "compare", *words)
    return next(line.strip() for line in printed.splitlines() if "gap p99" in line)


STEPS: Sequence[Callable[[Hour], str]] = (clone, set_up, serve, chat, try_policy, compare)


@program.command(
    folder=Opt(Path, "default: a new one, which is left there"),
    only=Opt([step.__name__ for step in STEPS], choices=[step.__name__ for step in STEPS]),
    port=8000,
)
def main(given: Args) -> tuple[dict[str, Any], int]:
    """Walk, and print a line of each step. The exit code is 1 if one has failed."""
    folder = given.folder or Path(tempfile.mkdtemp(prefix="first-hour-"))
    folder.mkdir(exist_ok=True)
    hour, found, has_failed = Hour(folder.absolute(), given.port), {}, False
    print(f"in {folder}")
    for step in STEPS:
        if step.__name__ not in given.only:
            continue
        begin = time.perf_counter()
        try:
            told = step(hour)
        except Exception as error:
            told, has_failed = f"FAILED: {error!r}", True
        seconds = time.perf_counter() - begin
        found[step.__name__] = {"seconds": round(seconds, 1), "told": told}
        print(f"{step.__name__:12} {seconds:6.1f} s  {told}", flush=True)
    return {"steps": found}, int(has_failed)


if __name__ == "__main__":
    program.main()
