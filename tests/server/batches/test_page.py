"""The page on batches is true: its line and its programs, run as they stand."""

import asyncio
from pathlib import Path

import pytest

from tests.server.batches.asking import serving
from tests.test_doc_pages import blocks

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])


@pytest.mark.parametrize("number", [0, 1])  # the program of the openai package, and our own
async def test_the_programs_of_the_page_run_its_line(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (line,), programs = blocks("batches.md", "json"), blocks("batches.md", "python")
    assert len(programs) == 2
    (tmp_path / "lines.jsonl").write_text(line)
    monkeypatch.chdir(tmp_path)
    async with serving(tmp_path) as (server, _):
        program = programs[number].replace("http://127.0.0.1:8000", server.url)
        code = compile(program.replace("(5)", "(0.05)"), "batches.md", "exec")
        await asyncio.to_thread(exec, code, {})
    printed = capsys.readouterr().out
    if number == 0:
        assert "completed BatchRequestCounts(completed=1, failed=0, total=1)" in printed
    assert '"custom_id":"scene 1"' in printed
