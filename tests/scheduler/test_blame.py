"""Of an error in a policy the line is named that its author wrote, not that of who called."""

from typing import Any

import pytest

from aioserve.scheduler import BaseScheduler
from aioserve.scheduler.blame import find_line, place


def helper() -> Any:
    return [1, 2].index(3)


class Wrong(BaseScheduler):
    def schedule(self) -> Any:
        return helper()

    def order(self, request: Any) -> Any:
        try:
            return helper()
        except ValueError as error:
            raise RuntimeError from error


@pytest.mark.parametrize("method", ["schedule", "order"])
def test_the_innermost_line_of_its_file_is_found_over_all_causes(method: str) -> None:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        getattr(Wrong, method)(*[None] * (1 + (method == "order")))
    line = find_line(caught.value, Wrong)
    assert line is not None
    assert (line.name, line.line) == ("helper", "return [1, 2].index(3)")
    assert place(caught.value, Wrong) == f" (test_blame.py:{line.lineno})"


def test_an_error_of_somebody_else_has_no_line_even_in_the_same_file() -> None:
    with pytest.raises(ValueError, match="is not in list") as caught:
        helper()
    assert find_line(caught.value, Wrong) is None
    assert place(caught.value, Wrong) == ""
