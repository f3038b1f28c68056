"""Conversations that a later request may go on with, the newest ones.

Bounded by number and by characters. Knows nothing about requests.
"""

from collections import OrderedDict
from collections.abc import Sequence

MAX_RESPONSES = 10_000
MAX_CHARACTERS = 2**26  # of all of them; each is whole, whatever it shares with others

Turn = dict[str, str]


class ResponseStore:
    """By the ids of responses: all messages up to their ends, without instructions."""

    def __init__(
        self, max_responses: int = MAX_RESPONSES, max_characters: int = MAX_CHARACTERS
    ) -> None:
        self._max_responses = max_responses
        self._max_characters = max_characters
        self._turns: OrderedDict[str, Sequence[Turn]] = OrderedDict()
        self._num_characters = 0

    def get(self, response_id: str) -> Sequence[Turn] | None:
        """None if it was never stored, or is forgotten."""
        if response_id in self._turns:
            self._turns.move_to_end(response_id)
        return self._turns.get(response_id)

    def put(self, response_id: str, turns: Sequence[Turn]) -> None:
        """Keep it; those that were not asked for the longest are forgotten for it."""
        self._turns[response_id] = turns
        self._num_characters += _length(turns)
        while len(self._turns) > self._max_responses or self._num_characters > self._max_characters:
            _, forgotten = self._turns.popitem(last=False)
            self._num_characters -= _length(forgotten)


def _length(turns: Sequence[Turn]) -> int:
    return sum(len(turn["content"]) for turn in turns)
