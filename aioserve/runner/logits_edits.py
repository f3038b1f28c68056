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
        self._params = params
        self._min_total_tokens = num_prompt_tokens + params.min_tokens
        # a tokenizer may know an EOS that the model has no logit for
        stops = sorted(token_id for token_id in stop_token_ids if token_id < vocab_size)
        self._stop_token_ids = torch.tensor(stops, dtype=torch.int64)
        self._bias = params.logit_bias or {}
        self._bias_ids = torch.tensor(list(self._bias), dtype=torch.int64)
        self._bias_values = torch.tensor(list(self._bias.values()), dtype=torch.float32)
        self._seen: Tensor | None = None  # bool [V], prompt and output
        self._output_counts: Tensor | None = None  # float32 [V]
        if params.repetition_penalty != 1:
            seen = np.bincount(token_ids, minlength=vocab_size) > 0
            self._seen = torch.from_numpy(seen)
        if params.presence_penalty or params.frequency_penalty:
            output = np.asarray(token_ids[num_prompt_tokens:], dtype=np.int64)
            counts = np.bincount(output, minlength=vocab_size)
            self._output_counts = torch.from_numpy(counts.astype(np.float32))

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Whether a request with `params` has edits at all."""
        return (
            params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
            or bool(params.logit_bias)
            or params.min_tokens > 0
        )

    def append(self, token_id: int) -> None:
        """Count a token that was sampled."""
        if self._seen is not None:
            self._seen[token_id] = True
        if self._output_counts is not None:
            self._output_counts[token_id] += 1

    def apply(self, logits: Tensor, num_tokens: int) -> None:
        """Edit `logits` (float32 [V]) in place; `num_tokens` are known before the next one."""
        params = self._params
        if self._seen is not None:
            # as transformers' RepetitionPenaltyLogitsProcessor (Keskar et al. 2019)
            penalty = params.repetition_penalty
            penalized = torch.where(logits < 0, logits * penalty, logits / penalty)
            logits.copy_(torch.where(self._seen, penalized, logits))
        if self._output_counts is not None:
            logits.sub_(self._output_counts, alpha=params.frequency_penalty)
            logits.sub_((self._output_counts > 0).float(), alpha=params.presence_penalty)
        if self._bias:
            logits[self._bias_ids] += self._bias_values
        if num_tokens < self._min_total_tokens:
            logits[self._stop_token_ids] = float("-inf")
