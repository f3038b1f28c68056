"""Where gloo listens while groups of ranks are made on several threads of one process."""

import os
import threading
from pathlib import Path

import pytest

from aioserve.gpu.tensor_parallel.group import GLOO_INTERFACE, GroupedRanks


@pytest.mark.parametrize("before", [None, "eth7"])
def test_groups_made_at_a_time_leave_the_interface_as_it_was(
    before: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if before is None:
        monkeypatch.delenv(GLOO_INTERFACE, raising=False)
    else:
        monkeypatch.setenv(GLOO_INTERFACE, before)
    for number in range(3):
        groups: list[GroupedRanks] = []

        def join(rank: int, meeting: Path = tmp_path / str(number), made: list = groups) -> None:
            made.append(GroupedRanks(rank, 4, meeting, 60.0))

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(groups) == 4  # none found the variable gone
        assert os.environ.get(GLOO_INTERFACE) == before
