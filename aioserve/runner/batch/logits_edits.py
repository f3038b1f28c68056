"""What one request changes about its logits before a token is chosen from them.

Penalties, `logit_bias`, stop tokens masked until `min_tokens`, bad words and allowed tokens: state
of one row, made only for rows that ask, and loaded with the first of them. Knows nothing about
other rows or about sampling.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aioserve.params import SamplingParams

#: Added to the last token of a bad word. Not -inf: what is masked must stay behind it, and where
#: nothing else is left, it is said.
BAD = -1e30


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
        bad = [token_ids[0] for token_ids in params.bad_words_ids if len(token_ids) == 1]
        biases = (params.logit_bias or {}).items()
        self._added = [(token_id, float(bias)) for token_id, bias in biases]
        self._added += [(token_id, BAD) for token_id in bad]
        #: Bad words of several tokens: the last is bad where the others were said just before.
        self.bad_sequences = [ids for ids in params.bad_words_ids if len(ids) > 1]
        self._num_recent = max(map(len, self.bad_sequences), default=1) - 1
        self._recent: list[int] = []  # said last, as many as a bad word has before its last token
        self._not_allowed: Tensor | None = None  # bool [V]
        self._token_ids = token_ids
        self._num_prompt_tokens = num_prompt_tokens
        self._vocab_size = vocab_size
        self._seen: Tensor | None = None  # bool [V], prompt and output
        self._output_counts: Tensor | None = None  # float32 [V]
        self._is_counted = False  # on a device, `DeviceSampler` counts

    def _count(self) -> None:
        params, token_ids, vocab_size = self.params, self._token_ids, self._vocab_size
        self._is_counted = True
        output_ids = token_ids[self._num_prompt_tokens :]
        self._recent = list(output_ids[-self._num_recent :]) if self._num_recent else []
        if params.allowed_token_ids:
            self._not_allowed = torch.ones(vocab_size, dtype=torch.bool)
            self._not_allowed[list(params.allowed_token_ids)] = False
        if params.repetition_penalty != 1:
            seen = np.bincount(token_ids, minlength=vocab_size) > 0
            self._seen = torch.from_numpy(seen)
        if params.presence_penalty or params.frequency_penalty:
            counts = np.bincount(np.asarray(output_ids, dtype=np.int64), minlength=vocab_size)
            self._output_counts = torch.from_numpy(counts.astype(np.float32))

    @property
    def counts_tokens(self) -> bool:
        """Whether the tokens said before change what may be said next: then nothing is drafted for
        the row. A card asks for `additions` before the last token is known.
        """
        return self.params.has_penalties or bool(self.bad_sequences)

    @cached_property
    def allowed_words(self) -> npt.NDArray[np.int32] | None:
        """The allowed tokens as bits, [ceil(V / 32)], the lowest first; None: all are."""
        if not self.params.allowed_token_ids:
            return None
        bits = np.zeros(-(-self._vocab_size // 32) * 32, dtype=np.bool_)
        bits[list(self.params.allowed_token_ids)] = True
        return np.packbits(bits, bitorder="little").view(np.int32)

    def append(self, token_id: int) -> None:
        """Count a token that was sampled."""
        if self._seen is not None:
            self._seen[token_id] = True
        if self._output_counts is not None:
            self._output_counts[token_id] += 1
        if self._num_recent:
            self._recent = [*self._recent, token_id][-self._num_recent :]

    def additions(self, num_tokens: int) -> list[tuple[int, float]]:
        """Token ids and what to add to their logits, after penalties, when `num_tokens` are known
        before the next one: bias, `BAD` for bad words of one token, and -inf for stop tokens that
        come too early.
        """
        return self._added + self._masked if num_tokens < self._min_total_tokens else self._added

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
        additions = self.additions(num_tokens)
        if self.bad_sequences:
            additions = additions + self._next_of_bad_sequences()
        if additions:
            token_ids, values = zip(*additions, strict=True)
            logits.index_add_(0, torch.tensor(token_ids), torch.tensor(values))
        if self._not_allowed is not None:
            logits.masked_fill_(self._not_allowed, float("-inf"))

    def _next_of_bad_sequences(self) -> list[tuple[int, float]]:
        return [
            (last, BAD)
            for *before, last in self.bad_sequences
            if self._recent[-len(before) :] == before
        ]
