"""`evolve` keeps a population on disk, goes on with it, and takes candidates from any model."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aioserve.cli.main import main
from aioserve.errors import ConfigError
from aioserve.lab.evaluate import Evaluator, Trials
from aioserve.lab.evaluate.evaluator import read_policy
from aioserve.lab.evolve import BATCH, Member, Model, Population, Search, Settings, digest
from tests.processes import serving

CHUNKED = read_policy("chunked_prefill")
#: Little traffic, on one workload.
SMALL = Trials(
    workloads=("documents",), held_out=("code",), held_out_seeds=(201,), requests=20, random_days=1
)


class Remembering(Evaluator):
    """Judges each text once: a search that goes on asks for what it has asked for before."""

    evaluate = cache(Evaluator.evaluate)


@pytest.fixture(scope="module")
def evaluator() -> Iterator[Evaluator]:
    with Remembering(msgspec.structs.replace(SMALL, seconds=600)) as made:
        yield made


@cache
def seed_score(evaluator: Evaluator) -> float:
    return evaluator.evaluate(CHUNKED, "mine.py", 2).score


def evolve(folder: Path, evaluator: Evaluator, budget: int, model: Model | None = None) -> None:
    """Search from `chunked_prefill`, which is known to keep the contract."""
    population = Population(folder, Settings(0, digest(CHUNKED), evaluator.trials))
    if not population.members:
        score = seed_score(evaluator)
        member = Member(
            number=0, parent=None, how="the seed", digest=digest(CHUNKED), score=score,
            is_proven=True,
        )  # fmt: skip
        population.add(member, CHUNKED)
    Search(population, evaluator, model=model).go_on(budget, lambda member: None)


def members(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "population.jsonl").read_text().splitlines()]


def test_a_search_goes_on_as_if_it_had_not_been_interrupted(
    tmp_path: Path, evaluator: Evaluator
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    evolve(whole, evaluator, 2)
    evolve(parts, evaluator, 1)
    with (parts / "population.jsonl").open("a") as file:
        file.write('{"number":2,"par')  # the line at which it was interrupted
    evolve(parts, evaluator, 2)
    assert members(parts) == members(whole)
    assert [member["number"] for member in members(whole)] == list(range(3))
    assert len({member["digest"] for member in members(whole)}) == 3


def test_a_folder_of_another_search_is_refused(tmp_path: Path) -> None:
    Population(tmp_path, Settings(0, "one", SMALL))
    Population(tmp_path, Settings(0, "one", SMALL))
    with pytest.raises(ConfigError, match="holds a search of another policy, seed or trials"):
        Population(tmp_path, Settings(1, "one", SMALL))


@pytest.mark.parametrize("flag", ["--model-name", "--model-share", "--max-tokens"])
def test_what_is_for_a_model_is_refused_without_one(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evolve", "--seed", "fcfs", "--folder", str(tmp_path / "x"), flag, "1"]) == 2
    assert "are for a model: give --model URL" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@contextmanager
def answering(text: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server of OpenAI's API that always says the same; its URL, and what it was asked."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({"data": [{"id": "parrot"}]})

        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._answer({"choices": [{"message": {"role": "assistant", "content": text}}]})

        def _answer(self, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1", asked
        finally:
            server.shutdown()
            thread.join()


def test_a_policy_that_a_model_writes_is_judged(tmp_path: Path, evaluator: Evaluator) -> None:
    source = read_policy("fcfs")
    with answering(f"This is better:\n```python\n{source}```\n") as (url, asked):
        evolve(tmp_path, evaluator, 1, Model(url))
    _, found = members(tmp_path)
    assert (found["how"], found["failure"]) == ("by parrot", "")
    assert found["score"] > 0
    assert (tmp_path / "0001.py").read_text() == source
    [body] = asked
    prompt = body["messages"][1]["content"]
    assert CHUNKED in prompt
    assert "% of the requests in time" in prompt


def test_a_model_is_told_how_candidates_failed(tmp_path: Path, evaluator: Evaluator) -> None:
    with answering("import time") as (url, asked):
        evolve(tmp_path, evaluator, BATCH + 1, Model(url))
    assert {member["failure"] for member in members(tmp_path)[1:]} == {"refused"}
    assert "imports time" in asked[-1]["messages"][1]["content"]


@contextmanager
def embedded() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    with serving() as (_, url):
        yield url, []


@pytest.mark.parametrize(
    "server",
    [partial(answering, "I know none."), pytest.param(embedded, marks=pytest.mark.slow)],
    ids=["parrot", "embedded"],
)
def test_nonsense_of_a_model_is_counted_as_unparsable(
    server: Callable[[], AbstractContextManager[tuple[str, list[dict[str, Any]]]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trials = ("--workloads", "documents", "--requests", "20", "--seconds", "600")
    with server() as (url, _):
        words = ("--model", url, "--model-share", "1", "--max-tokens", "40", "--budget", "2")
        folder = ("--folder", str(tmp_path))
        assert main(["evolve", "--seed", "chunked_prefill", *folder, *words, *trials]) == 0
    assert [member["failure"] for member in members(tmp_path)[1:]] == ["unparsable"] * 2
    assert "2 candidates; failed: 2 unparsable." in capsys.readouterr().out
    assert (tmp_path / "best.py").read_text() == CHUNKED


def test_a_server_that_is_not_there_is_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"no model at http://127\.0\.0\.1:9/v1/models"):
        Model("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="takes the URL of a server"):
        Model("file:///etc/passwd")
