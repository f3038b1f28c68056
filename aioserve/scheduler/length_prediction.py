"""Predicted lengths of replies: what a client states, else what its earlier replies were like.

Knows which requests are alike and which have ended by themselves. The lengths are in the table of
requests, so that a policy that takes over knows what the one before it has learned.
"""

from collections.abc import Callable, Hashable
from typing import ClassVar

from aioserve.errors import PolicyError
from aioserve.hints import PREDICTED_OUTPUT_TOKENS, SLO_CLASS
from aioserve.request import Request
from aioserve.scheduler.hinted import hinted_number, hinted_text
from aioserve.scheduler.length_history import LengthHistory
from aioserve.scheduler.succession import Switchable


class LengthPredicting(Switchable):
    """A scheduler whose policy may ask how long a reply will be."""

    #: True if the policy asks `predicted_tokens`: it then learns from each reply that ends.
    uses_predicted_tokens: ClassVar[bool] = False

    def predicted_tokens(self, request: Request, default: float) -> float:
        """How many tokens the reply is expected to have in all. The hint `predicted_output_tokens`,
        if the request states it; else the mean of the newest replies to requests of the same API
        key, `user`, adapter and hint `slo_class`, as far as these got beyond what it has now, drawn
        towards the mean of all replies while there are few; `default` until a reply has ended.

        A reply that has outgrown its prediction counts as half-way. Never more than the request may
        have. Needs `uses_predicted_tokens = True`.
        """
        if not self.uses_predicted_tokens:
            raise PolicyError(
                f"policy {type(self).__name__} asks predicted_tokens() without "
                "uses_predicted_tokens = True"
            )
        so_far, history = request.num_output_tokens, self.book.reply_lengths
        expected = hinted_number(request, PREDICTED_OUTPUT_TOKENS, 0.0)
        if expected <= 0:
            known = default if history is None else history.expect(_group(request), so_far)
            expected = known or 0.0
        if expected <= so_far:
            expected = 2.0 * so_far
        return min(expected, request.max_total_tokens - request.num_prompt_tokens)

    def _length_hooks(self) -> tuple[Callable[[Request, str], None], ...]:
        """What is to be called with each request that has ended."""
        return (self._learn_length,) if self.uses_predicted_tokens else ()

    def _learn_length(self, request: Request, reason: str) -> None:
        """Replies that were broken off say nothing of their length."""
        if reason not in ("stop", "length") or not request.num_output_tokens:
            return
        if self.book.reply_lengths is None:
            self.book.reply_lengths = LengthHistory()
        self.book.reply_lengths.note(_group(request), request.num_output_tokens)


def _group(request: Request) -> Hashable:
    """Equal for requests whose replies are compared; of one client, so far as the server can tell
    clients apart.
    """
    slo_class = hinted_text(request, SLO_CLASS)
    return request.spec.key_name, request.user, request.adapter_id, slo_class
