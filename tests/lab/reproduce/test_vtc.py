"""The command `reproduce vtc`, on outcomes of a few requests."""

import csv
import gzip
import json
from pathlib import Path

import pytest

from aioserve.cli.main import main
from aioserve.lab.reproduce.commands import FOLDER

NUM_REQUESTS = 399


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with the first outcomes of the workload `overload`."""
    folder = tmp_path / "data"
    folder.mkdir()
    for file in FOLDER.glob("overload.*.csv.gz"):
        with gzip.open(file, "rt") as whole:
            lines = whole.readlines()[: 1 + NUM_REQUESTS]
        (folder / file.name.removesuffix(".gz")).write_text("".join(lines))
    assert {path.name for path in folder.iterdir()} == {"overload.fcfs.csv", "overload.vtc.csv"}
    return folder


def measured_ttft(path: Path, client: str) -> float:
    """The mean time to first token that the file states of this client."""
    with path.open(newline="") as file:
        values = [float(row["ttft_s"]) for row in csv.DictReader(file) if row["client"] == client]
    return sum(values) / len(values)


@pytest.mark.slow
def test_it_says_how_far_the_simulated_runs_are(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "found.json"
    words = ["reproduce", "vtc", "overload", "--runs", "1", "--data", str(data)]
    assert main([*words, "--json", str(found)]) == 0
    printed, told = capsys.readouterr()
    assert "Fitting step times to the outcomes first come, first served" in told
    assert "Simulating the requests of all workloads: " in told
    [table] = json.loads(found.read_bytes())["tables"]
    assert (table["workload"], table["policy"], table["requests"]) == ("overload", "VTC", 399)
    rows = {row["name"]: row for row in table["rows"]}
    errors = []
    for client, num_requests in (("0", 133), ("1", 266)):
        vtc, fcfs = (
            measured_ttft(data / f"overload.{name}.csv", client) for name in ("vtc", "fcfs")
        )
        label = f"client {client} ({num_requests} requests): TTFT mean"
        ttft, ratio = rows[f"{label}, s"], rows[f"{label}, VTC/FCFS"]
        assert ttft["measured"] == pytest.approx(vtc)
        assert ratio["measured"] == pytest.approx(vtc / fcfs)
        for row in (ttft, ratio):
            assert row["least"] <= row["predicted"] <= row["most"]
            assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1)
            # Measured: up to 16%. Those who were served beside them are not in the files.
            assert abs(row["error"]) < 0.25
            assert f"{row['predicted']:.4g}" in printed
        assert (ratio["measured"] < 1) == (ratio["predicted"] < 1) == (client == "0")
        errors.append(abs(ttft["error"]))
    largest = f"largest {100 * max(errors):.2f}%"
    mean = f"mean absolute error {100 * sum(errors) / 2:.2f}%"
    assert f"TTFT mean of clients: 2 published, {mean}, {largest}" in printed
