"""Where a message ends that has several lines."""

import pytest

from aioserve.cli.chat import read_message


@pytest.mark.parametrize(
    ("lines", "messages"),
    [
        (["one", "two"], ["one", "two"]),
        (["one \\", "and more\\", "", "two"], ["one \nand more\n", "two"]),
        (['"""', "one", "", "  more \\", '"""', "two"], ["one\n\n  more \\", "two"]),
        (['"""one', 'more"""', "two"], ["one\nmore", "two"]),
        (['"""one"""', "two"], ["one", "two"]),
        (["one\\"], ["one\n"]),
        (['"""', "one"], ["one"]),
        ([""], [""]),
    ],
)
def test_lines_become_messages(lines: list[str], messages: list[str]) -> None:
    left = iter(lines)

    def read_line(prompt: str) -> str:
        for line in left:
            return line
        raise EOFError

    assert [read_message(read_line) for _ in messages] == messages
    with pytest.raises(EOFError):
        read_message(read_line)
