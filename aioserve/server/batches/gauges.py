"""How many batches there are, and how many of their lines are answered, for /metrics.

Knows batches as their owners see them. Knows no disk and no process.
"""

from collections import Counter
from collections.abc import Iterable

from aioserve.operations.command import Counted
from aioserve.server.batches.protocol import Batch, Status

UNFINISHED: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")


def batch_gauges(batches: Iterable[Batch]) -> list[Counted]:
    """Of the batches that have not ended: their number by status, and that of their lines by
    whether each has an answer. The lines of a batch are known once it is `in_progress`.
    """
    statuses: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for batch in batches:
        statuses[batch.status] += 1
        counts = batch.request_counts
        lines["completed"] += counts.completed
        lines["failed"] += counts.failed
        lines["waiting"] += counts.total - counts.completed - counts.failed
    return [
        Counted(
            "batches",
            "Batches that have not ended, by status",
            ("status",),
            [((status,), statuses[status]) for status in UNFINISHED],
            is_gauge=True,
        ),
        Counted(
            "batch_lines",
            "Lines of batches that run: answered, answered with an error, or neither yet",
            ("state",),
            [((state,), lines[state]) for state in ("waiting", "completed", "failed")],
            is_gauge=True,
        ),
    ]
