"""`make tree`: every module says what it is in one sentence."""

from pathlib import Path

import pytest

from tests.tree import FOLDERS, MAX_LENGTH, ROOT, first_sentence, main, modules


def test_every_module_opens_with_a_sentence_that_fits_the_tree() -> None:
    wrong = {}
    for path in modules():
        sentence = first_sentence(path.read_text(encoding="utf-8"))
        if not sentence.endswith((".", ":", "?", "!")) or len(sentence) > MAX_LENGTH:
            wrong[str(path.relative_to(ROOT))] = sentence or "no docstring"
    assert not wrong, f"a docstring begins with one sentence of at most {MAX_LENGTH} characters"


@pytest.mark.parametrize(
    ("docstring", "sentence"),
    [
        ("One line.", "One line."),
        ("Two\nlines. And more.", "Two lines."),
        ("A module: `a.b` stays whole.\n\nMore.", "A module: `a.b` stays whole."),
        ("A script:\n\n    python it.py", "A script:"),
        ("", ""),
    ],
)
def test_the_tree_shows_the_first_sentence_of_a_docstring(docstring: str, sentence: str) -> None:
    assert first_sentence(f'"""{docstring}"""\n') == sentence


def test_the_tree_prints_every_module(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(list(FOLDERS)) == 0
    printed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    names = [path.name for path in modules() if path.name != "__init__.py"]
    assert sorted(name for name in printed if name.endswith(".py")) == sorted(names)


def test_the_tree_refuses_what_is_no_folder_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    assert "is no folder of" in capsys.readouterr().err
