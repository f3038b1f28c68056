"""Values of rows that a policy wants back from the runner: said with each step, read of requests.

Knows names. What they mean, `aioserve.row_values` says; what they are, the runner.
"""

from collections.abc import Callable
from typing import ClassVar

from aioserve.row_values import ROW_VALUES, check_names
from aioserve.scheduler.output import SchedulerOutput
from aioserve.scheduler.succession import Switchable


class RowReading(Switchable):
    """A scheduler whose policy may want numbers of each row besides its token."""

    #: Names of the values that the policy reads as `request.row_values`: `"entropy"` of the model's
    #: distribution of the next token, in nats, or `"package.module:function"`, which is given float
    #: logits [S, V] of S rows and returns S numbers. Computed on a CPU; refused at the start on
    #: CUDA; invented in the lab and in the shadow, which have no model.
    wants_row_values: ClassVar[tuple[str, ...]] = ()

    def _row_hooks(self) -> tuple[Callable[[SchedulerOutput], None], ...]:
        """What is to be called with each step that is planned: nothing, unless values are wanted.
        Raises `ConfigError` for names that are none.
        """
        names = check_names(self.wants_row_values, type(self).__name__)
        return (self._ask_row_values,) if names else ()

    def _ask_row_values(self, output: SchedulerOutput) -> None:
        """Add the wanted names to a step that nobody has seen yet."""
        if rows := output.num_scheduled_tokens:
            output.parts[ROW_VALUES] = dict.fromkeys(rows, self.wants_row_values)
