"""The doctor finds what is there; what is missing comes with the line that brings it."""

import json
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from aioserve.cli import doctor
from aioserve.cli.doctor import EXTRAS, look_at_attention_kernels, look_at_packages
from aioserve.cli.main import main
from aioserve.kernels.library import VARIANTS, choose_variant, usable_variants
from tests import processes

ROOT = Path(__file__).parents[2]


def test_what_is_found_is_told_a_line_each_and_in_the_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main(["doctor"])
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line and not line.startswith(" ")]
    *findings, summary = lines
    states = [line.split()[0] for line in findings]
    assert set(states) <= {"ok", "note", "missing"}
    assert code == int("missing" in states)
    assert summary.startswith(f"missing: {states.count('missing') or 'nothing'};")
    assert f"{sys.executable}" in printed
    assert all(f"extra {name}" in printed for name in EXTRAS)


@pytest.mark.skipif(not usable_variants(), reason="no compiled kernels here")
def test_the_kernels_that_serve_are_named_and_why_no_better_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["doctor"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "kernels  " in line]
    variant = choose_variant()
    better = list(VARIANTS)[: list(VARIANTS).index(variant)]
    assert f"  {variant}, the best here" in line
    assert all(f"{name} needs a CPU with" in line or f"{name} was not" in line for name in better)


@pytest.mark.skipif(not usable_variants(), reason="no compiled kernels here")
@pytest.mark.slow
def test_kernels_that_were_not_built_are_missing(tmp_path: Path) -> None:
    """The package with all but its compiled files."""
    package = tmp_path / "aioserve"
    package.mkdir()
    for path in (ROOT / "aioserve").iterdir():
        if path.name != "kernels":
            (package / path.name).symlink_to(path)
    shutil.copytree(
        ROOT / "aioserve/kernels", package / "kernels", ignore=shutil.ignore_patterns("*.so")
    )
    result = processes.run(sys.executable, "-m", "aioserve", "doctor", cwd=tmp_path)
    assert result.returncode == 1
    assert "missing  kernels " in result.stdout
    assert "none: they were not built" in result.stdout
    assert "make -B install" in result.stdout


def test_a_variant_that_this_cpu_does_not_have_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AIOSERVE_KERNELS", "mmx")
    monkeypatch.setenv("AIOSERVE_API_KEY", "sesame")
    assert main(["doctor", "--json"]) == 1
    printed = capsys.readouterr().out
    assert "sesame" not in printed
    (found,) = [one for one in json.loads(printed)["findings"] if one["name"] == "kernels"]
    assert found["state"] == "missing"
    assert "not 'mmx'" in found["text"]
    assert found["remedy"] == "unset AIOSERVE_KERNELS"


def test_kernels_that_are_not_wanted_are_no_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AIOSERVE_KERNELS", "off")
    main(["doctor"])
    assert "none, as AIOSERVE_KERNELS=off wants" in capsys.readouterr().out


def install(folder: Path, name: str, version: str, *needs: str) -> None:
    """A distribution that consists of its metadata."""
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {need}" for need in needs)]
    information = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    information.mkdir()
    metadata = "\n".join(["Metadata-Version: 2.1", *lines, ""])
    (information / "METADATA").write_text(metadata)


def test_an_environment_that_has_what_is_needed_is_well() -> None:
    first, *_ = look_at_packages(has_card=False)
    assert (first.state, first.remedy) == ("ok", None), first
    assert "torch 2." in first.text


def test_packages_that_are_missing_or_of_a_wrong_version_come_with_the_line_that_brings_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "aioserve-engine", "9.0", "msgspec>=99", "no-such-thing<3,>=2", "middle")
    install(tmp_path, "middle", "1.0", "nor-this; python_version>'3'", "not-me; extra == 'x'")
    monkeypatch.syspath_prepend(str(tmp_path))
    first, *_ = look_at_packages(has_card=False)
    assert first.state == "missing"
    assert "aioserve-engine needs msgspec>=99, and 0." in first.text
    assert "; no-such-thing is not installed; " in first.text
    assert first.text.endswith("nor-this is not installed, which middle needs")
    assert first.remedy == "pip install 'msgspec>=99' 'no-such-thing<3,>=2' 'nor-this'"


@pytest.mark.parametrize("has_card", [True, False])
def test_an_extra_is_a_note_and_missing_where_a_card_wants_it(
    has_card: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extras = [f"no-such-{name}; extra == '{name}'" for name in EXTRAS if name != "gguf"]
    install(tmp_path, "aioserve-engine", "9.0", "deep[sea]; extra == 'gguf'", *extras)
    install(tmp_path, "deep", "1", "msgspec; extra == 'sea'", "no-such-wreck; extra == 'wreck'")
    monkeypatch.syspath_prepend(str(tmp_path))
    _, *found = look_at_packages(has_card)
    by_name = {finding.name: finding for finding in found}
    assert by_name["extra gguf"].state == "ok"
    assert by_name["extra ray"].state == "note"
    assert by_name["extra gpu"].state == ("missing" if has_card else "note")
    assert by_name["extra gpu"].remedy == "pip install 'no-such-gpu'"


@pytest.mark.parametrize(
    ("tools", "cache", "told", "remedy"),
    [
        ([], "", "nvcc and ninja are not found", "-jit-cache==0.7.2 --index-url https://"),
        (["ninja"], "", "nvcc is not found", "flashinfer.ai/whl/cu130"),
        (["nvcc"], "", "ninja is not found", "pip install ninja"),
        ([], "0.7.1+cu130", "nvcc and ninja are not found", "-jit-cache==0.7.2"),
        (["nvcc", "ninja"], "", "nvcc at a model's first start", None),
        ([], "0.7.2+cu130", "flashinfer-jit-cache 0.7.2", None),
    ],
)
def test_a_card_without_kernels_for_its_attention_is_told_the_line_that_brings_them(
    tools: list[str],
    cache: str,
    told: str,
    remedy: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(tmp_path, "flashinfer-python", "0.7.2")
    if cache:
        install(tmp_path, "flashinfer-jit-cache", cache)
    for name in tools:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "none"))
    monkeypatch.setattr(doctor, "_TOOLKIT", str(tmp_path / "none"))
    assert look_at_attention_kernels(has_card=False, cuda="13.0") == []
    assert look_at_attention_kernels(has_card=True, cuda=None) == []
    (found,) = look_at_attention_kernels(has_card=True, cuda="13.0")
    assert told in found.text
    assert found.state == ("missing" if remedy else "ok")
    assert remedy is None or remedy in str(found.remedy)


def test_every_extra_but_that_of_our_tests_is_known() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert EXTRAS.keys() == project["optional-dependencies"].keys() - {"test"}
