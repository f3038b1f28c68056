"""The command `reproduce vtc`, on outcomes of a few requests."""

import gzip
from pathlib import Path

import pytest

from aioserve.cli.main import main
from aioserve.lab.reproduce.commands import FOLDER


def test_it_says_how_far_the_simulated_runs_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in FOLDER.glob("overload.*.csv.gz"):
        with gzip.open(file, "rt") as whole:
            (tmp_path / file.name.removesuffix(".gz")).write_text("".join(whole.readlines()[:400]))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert "overload.fcfs.csv" in names
    assert main(["reproduce", "vtc", "overload", "--runs", "1", "--data", str(tmp_path)]) == 0
    told = capsys.readouterr().err
    assert "Fitting step times to the outcomes first come, first served" in told
    assert "Simulating the requests of all workloads: " in told
