"""The page on batches is true: its line and its program, run as they stand."""

import asyncio
from pathlib import Path

import pytest

from tests.server.batches.asking import serving
from tests.test_doc_pages import blocks

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])


async def test_the_program_of_the_page_runs_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (line,), (program,) = blocks("batches.md", "json"), blocks("batches.md", "python")
    (tmp_path / "lines.jsonl").write_text(line)
    monkeypatch.chdir(tmp_path)
    async with serving(tmp_path) as (server, _):
        changed = program.replace("http://127.0.0.1:8000", server.url).replace("(5)", "(0.05)")
        await asyncio.to_thread(exec, compile(changed, "batches.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "completed BatchRequestCounts(completed=1, failed=0, total=1)" in printed
    assert '"custom_id":"scene 1"' in printed
