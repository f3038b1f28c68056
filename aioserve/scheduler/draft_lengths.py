"""How many draft tokens a policy asks for: its answer for each request goes to the runner.

Knows what a policy may answer. Knows nothing about how tokens are guessed, or which are right.
"""

from collections.abc import Callable

from aioserve.errors import PolicyError
from aioserve.request import Request
from aioserve.scheduler.blame import asking
from aioserve.scheduler.output import SchedulerOutput
from aioserve.scheduler.succession import Switchable


class Drafting(Switchable):
    """A scheduler whose policy may say how many tokens speculative decoding guesses."""

    def draft_length(self, request: Request) -> int | None:
        """How many draft tokens to guess for a request after this step, before any is: 0 to
        `max_draft_tokens`, of which a later step verifies what it grants; None: as many as the
        runner finds to pay. Asked by `step.output()`, for each request of the step, where tokens
        are guessed at all. Tokens that a grammar leaves no choice about come all the same.
        """
        return None

    @property
    def max_draft_tokens(self) -> int:
        """Most draft tokens that are guessed for a request after a step; 0: speculative decoding is
        off.
        """
        return self.kv_cache.max_draft_tokens

    def _draft_hooks(self) -> tuple[Callable[[SchedulerOutput], None], ...]:
        """What is to be called with each step that is planned: nothing, unless the policy answers
        and tokens are guessed.
        """
        is_asked = type(self).draft_length is not Drafting.draft_length
        return (self._tell_draft_lengths,) if is_asked and self.max_draft_tokens else ()

    def _tell_draft_lengths(self, output: SchedulerOutput) -> None:
        """Add what the policy answers to a step that nobody has seen yet."""
        if not output.num_scheduled_tokens:
            return
        ask = asking(self, "draft_length")
        lengths = {
            request.request_id: self._checked(length)
            for request in self.book.in_flight[-1][1]
            if request.pooling_params is None and (length := ask(request)) is not None
        }
        if lengths:
            output.parts["draft_lengths"] = lengths

    def _checked(self, length: object) -> int:
        """Raises `PolicyError` for an answer that is no number of draft tokens."""
        if type(length) is int and 0 <= length <= self.max_draft_tokens:
            return length
        raise PolicyError(
            f"policy {type(self).__name__}: draft_length() must return None or a whole number from "
            f"0 to {self.max_draft_tokens}, got {length!r:.80}"
        )
