"""What one request changes about its logits before a token is chosen from them.

Penalties, `logit_bias` and stop tokens masked until `min_tokens`: state of one row, made only for
rows that ask. Knows nothing about other rows or about sampling.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from aioserve.sampling_params import SamplingParams


class LogitsEdits:
    """Edits of one row; the operations are defined in the docstring of `SamplingParams`."""

    def __init__(
        self,
        params: SamplingParams,
        stop_token_ids: Iterable[int],
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        vocab_size: int,
    ) -> None:
        self.params = params
        self._min_total_tokens = num_prompt_tokens + params.min_tokens
        # a tokenizer may know an EOS that the model has no logit for
        stops = sorted(token_id for token_id in stop_token_ids if token_id < vocab_size)
        self._masked = [(token_id, float("-inf")) for token_id in stops]
        self._bias = list((params.logit_bias or {}).items())
        self._token_ids = token_ids
        self._num_prompt_tokens = num_prompt_tokens
        self._vocab_size = vocab_size
        self._seen: Tensor | None = None  # bool [V], prompt and output
        self._output_counts: Tensor | None = None  # float32 [V]
        self._is_counted = False  # on a device, somebody else counts

    def _count(self) -> None:
        params, token_ids, vocab_size = self.params, self._token_ids, self._vocab_size
        self._is_counted = True
        if params.repetition_penalty != 1:
            seen = np.bincount(token_ids, minlength=vocab_size) > 0
            self._seen = torch.from_numpy(seen)
        if params.presence_penalty or params.frequency_penalty:
            output = np.asarray(token_ids[self._num_prompt_tokens :], dtype=np.int64)
            counts = np.bincount(output, minlength=vocab_size)
            self._output_counts = torch.from_numpy(counts.astype(np.float32))

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Whether a request with `params` has edits at all."""
        return has_penalties(params) or bool(params.logit_bias) or params.min_tokens > 0

    @property
    def counts_tokens(self) -> bool:
        """Whether what was said before changes what is said next."""
        return has_penalties(self.params)

    def append(self, token_id: int) -> None:
        """Count a token that was sampled."""
        if self._seen is not None:
            self._seen[token_id] = True
        if self._output_counts is not None:
            self._output_counts[token_id] += 1

    def additions(self, num_tokens: int) -> list[tuple[int, float]]:
        """Token ids and what to add to their logits, after penalties, when `num_tokens` are known
        before the next one: bias, and -inf for stop tokens that come too early.
        """
        return self._bias + self._masked if num_tokens < self._min_total_tokens else self._bias

    def apply(self, logits: Tensor, num_tokens: int) -> None:
        """Edit `logits` (float32 [V]) in place; `num_tokens` are known before the next one."""
        if not self._is_counted:
            self._count()
        params = self.params
        if self._seen is not None:
            # as transformers' RepetitionPenaltyLogitsProcessor (Keskar et al. 2019)
            penalty = params.repetition_penalty
            penalized = torch.where(logits < 0, logits * penalty, logits / penalty)
            logits.copy_(torch.where(self._seen, penalized, logits))
        if self._output_counts is not None:
            logits.sub_(self._output_counts, alpha=params.frequency_penalty)
            logits.sub_((self._output_counts > 0).float(), alpha=params.presence_penalty)
        if additions := self.additions(num_tokens):
            token_ids, values = zip(*additions, strict=True)
            logits.index_add_(0, torch.tensor(token_ids), torch.tensor(values))


def has_penalties(params: SamplingParams) -> bool:
    """Whether what was said before changes what is said next."""
    return (
        params.repetition_penalty != 1
        or params.frequency_penalty != 0
        or params.presence_penalty != 0
    )
