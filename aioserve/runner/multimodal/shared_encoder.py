"""The image encoder of several ranks: the first one encodes, and tells the others the rows.

So an image that fails does so on all of them, and the encoder's weights are in memory once.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from aioserve.kv_cache import Ahead
from aioserve.multimodal.families import Family
from aioserve.request import EncoderInput
from aioserve.runner.multimodal.image_encoder import ImageEncoder, num_deep_rows
from aioserve.runner.tensor_parallel.group import Ranks

_FAILED = "the image could not be encoded on the first rank"  # which tells the client why


class SharedImageEncoder(ImageEncoder):
    """The part of it that one of `ranks` has."""

    def __init__(self, module: Any, family: Family, token_ids: Sequence[int], ranks: Ranks) -> None:
        super().__init__(module, family, token_ids)
        self._ranks = ranks
        self._width = self._hidden_size * (1 + num_deep_rows(module.config))
        if not ranks.is_first:
            self._module, self.num_parameters = None, 0

    def encode_ahead(self, ahead: Ahead) -> None:
        if self._ranks.is_first or ahead.is_last:
            super().encode_ahead(ahead)

    def encode(self, items: Iterable[tuple[EncoderInput, int]]) -> None:
        items, ranks = list(items), self._ranks
        if ranks.is_first:
            super().encode(items)
        hashes = [item.content_hash for item, _ in items]
        are_made = ranks.told_by_first([content in self._made for content in hashes])
        for (_, count), content, is_made in zip(items, hashes, are_made, strict=True):
            self._gone.discard(content)
            if not is_made:
                self._failures.setdefault(content, _FAILED)
                continue
            rows = self._made.get(content) if ranks.is_first else None
            if rows is None:
                rows = torch.empty(count, self._width, dtype=self._dtype)
            ranks.tell(rows)
            self._made[content] = rows
            self._failures.pop(content, None)
