"""One request in the batch of a toy runner, and what its keys and values depend on.

Knows tokens, encoder inputs and what keeps requests apart. Knows no slots and no steps.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from aioserve.params import PoolingParams
from aioserve.request import EncoderInput
from aioserve.testing.replies import Reply


@dataclass(slots=True)
class Row:
    """As the steps have told it so far."""

    token_ids: list[int]
    block_ids: list[int]
    num_computed: int
    encoder_inputs: tuple[EncoderInput, ...]
    namespace: Hashable
    num_prompt_tokens: int
    reply: Reply
    pooling: PoolingParams | None
    pooled: list[int] = field(default_factory=list)  # the tokens whose states were pooled
    keys: list[int] = field(default_factory=list)  # of token_ids, on demand
    proposed: list[int] = field(default_factory=list)  # draft tokens, after its newest token
    # Those proposed before that token, which come after it: of a step that was planned ahead.
    proposed_before: list[int] = field(default_factory=list)

    def keys_with(self, drafts: Sequence[int]) -> list[int]:
        """What keys and values of each position depend on: namespace, tokens, encoder inputs."""
        self._extend(self.keys, self.token_ids)
        if not drafts:
            return self.keys
        keys = self.keys.copy()
        self._extend(keys, [*self.token_ids, *drafts])
        return keys

    def _extend(self, keys: list[int], token_ids: Sequence[int]) -> None:
        for position in range(len(keys), len(token_ids)):
            content = [
                (position - item.position, item.content_hash)
                for item in self.encoder_inputs
                if item.position <= position < item.end
            ]
            before: Hashable = keys[-1] if keys else self.namespace
            keys.append(hash((before, token_ids[position], *content)))
