"""Which token a request gets next, whatever runs beside it: what it would get alone.

Made up of all tokens before it, told by the test, or masked by a tiny grammar. Knows nothing about
batches, blocks or schedulers.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from zlib import crc32

from aioserve.errors import RequestError
from aioserve.params import StructuredOutputs

VOCAB_SIZE = 50

Drafter = Callable[[Sequence[int]], list[int]]


@dataclass(frozen=True, slots=True)
class Masked:
    """A reply that is one of some texts and then an EOS token, each character a token.

    Where they leave no choice, tokens come at once, as from the real runner's grammars.
    """

    choices: tuple[tuple[int, ...], ...]
    eos_token_ids: tuple[int, ...]

    @classmethod
    def by(cls, wanted: StructuredOutputs, eos_token_ids: Collection[int]) -> "Masked":
        """Raises `RequestError` for what no toy can compile."""
        if wanted.choice is None or not eos_token_ids:
            raise RequestError("toys know structured_outputs.choice alone, and need an EOS token")
        choices = tuple(
            tuple((ord(char) - 96) % VOCAB_SIZE for char in text) for text in wanted.choice
        )
        return cls(choices, tuple(eos_token_ids))

    def allowed(self, said: Sequence[int]) -> list[int]:
        """The mask after these tokens. Behind the end another end may follow, and nothing else."""
        begun = [own for own in self.choices if own[: len(said)] == tuple(said)]
        tokens = {own[len(said)] for own in begun if len(own) > len(said)}
        if len(tokens) == 0 or tuple(said) in begun:
            tokens.update(self.eos_token_ids)
        return sorted(tokens)

    def next_of(self, token_ids: Sequence[int], num_prompt_tokens: int) -> list[int]:
        """The tokens that have no alternative, if any, and the one after them."""
        sequence = list(token_ids)
        while True:
            allowed = self.allowed(sequence[num_prompt_tokens:])
            sequence.append(allowed[next_token(sequence) % len(allowed)])
            if len(allowed) > 1 or allowed[0] in self.eos_token_ids:
                return sequence[len(token_ids) :]


#: What a request is to get: tokens, of which those of a list come at once, as draft tokens that
#: turn out right, if the scheduler grants them; or by a mask.
Reply = Sequence[int | Sequence[int]] | Masked


def next_token(token_ids: Sequence[int]) -> int:
    """The token that follows: any fixed function of the whole sequence will do."""
    return crc32(repr(list(token_ids)).encode()) % VOCAB_SIZE


def next_of_reply(token_ids: Sequence[int], num_prompt_tokens: int, reply: Reply) -> list[int]:
    """What follows, by a reply and after its end by `next_token`: one token, or what is left of
    those that come at once. Of several the last is no draft.
    """
    if isinstance(reply, Masked):
        return reply.next_of(token_ids, num_prompt_tokens)
    position = len(token_ids) - num_prompt_tokens
    for item in reply:
        together = [item] if isinstance(item, int) else list(item)
        if position < len(together):
            return together[position:]
        position -= len(together)
    return [next_token(token_ids)]


def guess(token_ids: Sequence[int]) -> list[int]:
    """Draft tokens, zero to four, of which some are right: a `Drafter`."""
    dice = crc32(repr(list(token_ids[-3:])).encode())
    num_right, num_wrong = dice % 3, dice // 3 % 3
    sequence = list(token_ids)
    for _ in range(num_right):
        sequence.append(next_token(sequence))
    for _ in range(num_wrong):
        sequence.append((next_token(sequence) + 1) % VOCAB_SIZE)
    return sequence[len(token_ids) :]
