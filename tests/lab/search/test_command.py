"""`search` with values of settings: what it prints, and what it refuses."""

import re
from collections.abc import Callable
from html import unescape
from pathlib import Path

import msgspec
import pytest

from aioserve.cli.main import main
from aioserve.lab.tuning import DEFAULT, Tuning

CHUNKS = ["--set", "scheduler.options.chunk_size=64,2048"]
SMALL = ["search", "chunked_prefill", "--workload", "mixed", "--limit", "30"]


def test_options_are_tuned_on_some_seeds_and_judged_on_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "tuning.json"
    words = [*SMALL, *CHUNKS, "--by", "gap:p99", "--seeds", "3", "--json", str(data)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "trained on mixed.yaml with seeds 0 to 2, held out: seeds 3 to 5 of it." in printed
    assert re.search(r"chunk_size=64 +[\d.]+ +[\d.]+  chosen\n", printed)
    assert re.search(r"chunk_size=2048 +[\d.]+\n", printed)
    assert "chunk_size=64 is the best of 3 in training" in printed
    assert "The gain holds." in printed
    found = msgspec.json.decode(data.read_bytes(), type=Tuning)
    assert found.candidates == ["chunk_size=64", "chunk_size=2048", DEFAULT]
    assert found.held_out < found.held_out_default
    assert found.gain.high is not None
    assert found.gain.high < 0


def test_the_rate_within_the_slo_decides_unless_a_measure_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["search", "chunked_prefill", "--workload", "mixed", "--limit", "20", *CHUNKS]
    words += ["--seeds", "1", "--slo", "gap=0.02", "--goodput", "0.9", "--tolerance", "1"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "requests/s within the SLO: more is better." in printed
    assert "chunk_size=64 is the best of 3 in training" in printed


def test_a_trace_is_cut_in_time_and_one_of_another_kind_is_held_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "log.jsonl"
    line = '{{"arrival": {}, "prompt_tokens": {}, "output_tokens": 20}}\n'
    trace.write_text("".join(line.format(i / 20, 20 + 900 * (i % 7 == 0)) for i in range(60)))
    words = ["search", "chunked_prefill", "--workload", str(trace), *CHUNKS, "--by", "gap:p99"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "trained on the 30 requests of the first 1 s, held out: the 30 after them" in printed
    assert "there is no interval from so little" in printed
    assert main([*words, "--held-out", "mixed", "--limit", "60", "--seeds", "2"]) == 0
    printed = capsys.readouterr().out
    assert (
        "trained on log.jsonl with seeds 0 to 1, held out: mixed.yaml with seeds 0 to 1" in printed
    )


@pytest.mark.parametrize(
    ("words", "shown", "num_bars"),
    [
        (["--slo", "gap=0.05", "--goodput", "0.9", "--tolerance", "0.5"], "within the SLO", 2),
        pytest.param(
            ["--bound", "gap:p99=0.05", "--tolerance", "0.5"],
            "gap p99, ms (at most 50)",
            2,
            marks=pytest.mark.slow,
        ),
        ([*CHUNKS, "--by", "gap:p99", "--seeds", "1"], "chunk_size=2048", 5),
        (["--slo", "gap=0.05", "--replicas", "2", "--goodput", "0.5"], "chunked_prefill", 1),
    ],
)
def test_the_html_has_a_bar_for_all_that_was_tried_and_the_words_of_the_terminal(
    words: list[str],
    shown: str,
    num_bars: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "found.html"
    assert main([*SMALL, *words, "--html", str(path)]) == 0
    page = path.read_text()
    for tag in ("h1", "svg", "table", "tbody", "html"):
        assert page.count(f"<{tag}") == page.count(f"</{tag}>") == 1
    assert shown in page
    assert page.count("<rect") >= num_bars
    assert "src=" not in page  # nothing is fetched
    last_line = capsys.readouterr().out.splitlines()[-1].split()
    assert " ".join(last_line) in " ".join(unescape(re.sub(r"<[^>]+>", " ", page)).split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*SMALL, *CHUNKS], "--by e2e:mean"),
        ([*SMALL, "--slo", "ttft=1", "--by", "e2e:mean"], "--by is for a search over values"),
        ([*SMALL, "--slo", "ttft=1", "--held-out", "chat"], "--held-out is for a search over"),
        ([*SMALL, *CHUNKS, "--by", "e2e:mode"], "unknown measure 'e2e:mode'"),
        ([*SMALL, *CHUNKS, "--by", "e2e:mean", "--bound", "gap:p99=1"], "--by asks for none"),
        ([*SMALL, *CHUNKS, "--slo", "ttft=1", "--jobs", "2"], "--jobs is for --by"),
        ([*SMALL, *CHUNKS, "--by", "e2e:mean", "--train-share", "0.5"], "cuts a trace in two"),
        ([*SMALL, *CHUNKS, "--by", "e2e:mean", "--held-out", "mixed"], "the workload that trains"),
        ([*SMALL, *CHUNKS, *CHUNKS, "--by", "e2e:mean"], "is given twice"),
        ([*SMALL, *CHUNKS, "--by", "good_share", "--seeds", "1"], "good_share is not defined"),
    ],
)
def test_what_would_do_nothing_or_cannot_work_is_refused_in_one_line(
    words: list[str], message: str, refused: Callable[[list[str], str], None]
) -> None:
    refused(words, message)
