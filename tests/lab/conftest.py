"""Commands of the lab that are refused, as a shell sees it."""

import sys
from collections.abc import Callable

import pytest

from aioserve.cli.main import main


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[[list[str], str], None]:
    """`refused(words, message)`: they end with exit code 2, and one line that says `message`."""

    def check(words: list[str], message: str) -> None:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            sys.exit(main(words))
        said = capsys.readouterr().err
        assert caught.value.code == 2, said
        assert message in said
        assert said.count("\n") == 1, said

    return check
