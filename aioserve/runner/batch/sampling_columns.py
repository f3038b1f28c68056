"""How each row of the persistent batch is sampled, as columns; and the part that one step needs.

Knows rows and numbers; knows nothing about models or about how a token is chosen.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aioserve.runner.attention.backend import IntArray, StepInputs
from aioserve.runner.batch.batch_part import BatchPart
from aioserve.runner.batch.logits_edits import LogitsEdits
from aioserve.runner.noise import seed_words
from aioserve.runner.unsound import step_failed
from aioserve.scheduler.output import NewRequestData

logger = logging.getLogger(__name__)

FloatArray = npt.NDArray[np.float32]

NO_LOGPROBS = -1
# The smallest number that float32 holds in full precision. What is smaller, and not 0, is taken for
# it: rounded to 0, a temperature or a top-p would mean something else.
SMALLEST = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Columns of the S rows that sample in one step."""

    num_tokens: IntArray  # S, known before this step's token, i.e. the position of that token
    temperature: FloatArray  # S, 0 = greedy
    top_k: IntArray  # S, 0 = all
    top_p: FloatArray  # S
    min_p: FloatArray  # S
    seeds: npt.NDArray[np.uint32]  # [S, 2], low and high word
    num_logprobs: IntArray  # S, NO_LOGPROBS = not asked
    edits: dict[int, LogitsEdits]  # by place among the S, for those that have any

    def take(self, places: IntArray | npt.NDArray[np.bool_]) -> "SamplingInputs":
        """The columns of some of the rows; edits are left behind."""
        return SamplingInputs(
            num_tokens=self.num_tokens[places],
            temperature=self.temperature[places],
            top_k=self.top_k[places],
            top_p=self.top_p[places],
            min_p=self.min_p[places],
            seeds=self.seeds[places],
            num_logprobs=self.num_logprobs[places],
            edits={},
        )


class SamplingColumns(BatchPart[LogitsEdits]):
    """One entry per row of the persistent batch; `rows` are those whose logits are edited."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        super().__init__()
        self._vocab_size = vocab_size
        self._temperature = np.zeros(num_rows, dtype=np.float32)
        self._top_k = np.zeros(num_rows, dtype=np.int64)
        self._top_p = np.ones(num_rows, dtype=np.float32)
        self._min_p = np.zeros(num_rows, dtype=np.float32)
        self._seeds = np.zeros((num_rows, 2), dtype=np.uint32)
        self._num_logprobs = np.full(num_rows, NO_LOGPROBS, dtype=np.int64)

    def set(self, row: int, request: NewRequestData) -> None:
        params = request.sampling_params
        self._temperature[row] = params.temperature and max(params.temperature, SMALLEST)
        self._top_k[row] = min(max(params.top_k, 0), self._vocab_size)
        self._top_p[row] = max(params.top_p, SMALLEST)
        self._min_p[row] = params.min_p
        self._seeds[row] = seed_words(params.seed or 0)
        self._num_logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        if LogitsEdits.needed(params):
            self.rows[row] = LogitsEdits(
                params,
                request.stop_token_ids,
                request.token_ids,
                request.num_prompt_tokens,
                self._vocab_size,
            )

    def append(
        self, rows: IntArray, token_ids: list[list[int]], drafts: Mapping[int, Sequence[int]]
    ) -> None:
        del drafts
        for row, own in zip(rows.tolist(), token_ids, strict=True):
            try:
                if row in self.rows:
                    for token_id in own:
                        self.rows[row].append(token_id)
            except Exception as error:
                logger.exception("a token could not be counted")
                self.errors.setdefault(row, step_failed(error))

    def counts_tokens(self, row: int) -> bool:
        """Whether what a row has said changes what it says next."""
        return row in self.rows and self.rows[row].counts_tokens

    def of(self, inputs: StepInputs) -> SamplingInputs:
        """The sampler's inputs for the S rows of a step that sample."""
        num_tokens = inputs.positions[inputs.logits_indices] + 1
        return self.select(inputs.rows[inputs.sampling], num_tokens)

    def select(self, rows: IntArray, num_tokens: IntArray) -> SamplingInputs:
        """The sampler's inputs for `rows`, which hold `num_tokens` each."""
        edits = {}
        if self.rows:
            places = enumerate(rows.tolist())
            edits = {place: self.rows[row] for place, row in places if row in self.rows}
        return SamplingInputs(
            num_tokens=num_tokens,
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            seeds=self._seeds[rows],
            num_logprobs=self._num_logprobs[rows],
            edits=edits,
        )
