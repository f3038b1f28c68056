"""Which parts the batch of a runner has, on either side: a new part gets its line here.

A part that not every request needs is made, and its module loaded, when the first request asks for
it; a part of few models, when such a model is served.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from aioserve.runner.batch.input_batch import BatchPart, LaterPart
from aioserve.runner.batch.sampling_columns import SamplingColumns
from aioserve.runner.served_model import ServedModel
from aioserve.support.parts import Brought

if TYPE_CHECKING:
    from aioserve.kv_cache import WindowSpec
    from aioserve.runner.batch.drafter import Drafter, DraftRows
    from aioserve.runner.batch.masks import BoundRows
    from aioserve.runner.interface import OutputCompiler

#: What parts of aioserve bring for the batch, by the names of what it is about.
PARTS = Brought[Callable[..., Any]]("batch parts")

_GRAMMAR, _BUDGET = "sampling_params.structured_outputs", "sampling_params.thinking_budget"


class BatchParts:
    """The parts of one batch; `all` in the order in which they are called."""

    def __init__(
        self,
        model: ServedModel,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        *,
        grammars: "OutputCompiler | None" = None,
        eos_token_ids: Sequence[int] = (),
        drafter: "Drafter | None" = None,
        windows: "WindowSpec | None" = None,
    ) -> None:
        """Without `grammars`, no request may ask for structured outputs or thinking budgets."""
        self.sizes = max_num_seqs, max_model_len, block_size  # as `InputBatch` takes them
        self.sampling = SamplingColumns(max_num_seqs, vocab_size)
        self.drafter = drafter
        self._compiler, self._vocab_size, self._eos_token_ids = grammars, vocab_size, eos_token_ids
        parts: list[BatchPart[Any] | LaterPart | None] = [
            self.sampling,
            LaterPart(("sampling_params.prompt_logprobs",), _prompt_rows),
            LaterPart(("pooling_params",), _pooled_rows),
            LaterPart(("adapter_id",), lambda: self.adapters),
            model.image_encoder,
        ]
        if model.states is not None:
            parts.append(PARTS["states"](max_num_seqs, model.states.take_back))
        if windows is not None:
            parts.append(PARTS["windows"](max_num_seqs, max_model_len, block_size))
        # A budget's matcher stands among those of grammars.
        parts.append(LaterPart((_GRAMMAR, _BUDGET), lambda: self.grammars))
        parts.append(LaterPart((_BUDGET,), self._thinking_rows))
        parts.append(None if drafter is None else self.drafts)
        self.all = tuple(part for part in parts if part is not None)

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens that are guessed for a row; 0 without a drafter."""
        return 0 if self.drafter is None else self.drafter.length.max_tokens

    @property
    def has_matchers(self) -> bool:
        """Whether a row has a grammar or a thinking budget."""
        return "grammars" in self.__dict__ and bool(self.grammars.rows)

    @cached_property
    def grammars(self) -> "BoundRows":
        """The part that masks logits of rows with a grammar or a thinking budget, by matchers."""
        made: BoundRows = PARTS["grammars"](self._compiler, self._vocab_size, self._eos_token_ids)
        return made

    @cached_property
    def adapters(self) -> BatchPart[Any]:
        """Loaded LoRA adapters, and those of rows."""
        made: BatchPart[Any] = PARTS["adapters"]()
        return made

    @cached_property
    def drafts(self) -> "DraftRows":
        """The part that guesses tokens, by the drafter or where a grammar leaves no choice."""
        from aioserve.runner.batch.drafter import DraftRows

        return DraftRows(self.drafter, self.sampling, self.grammars)

    def _thinking_rows(self) -> BatchPart[Any]:
        made: BatchPart[Any] = PARTS["thinking"](self._compiler, self.grammars)
        return made


def _prompt_rows() -> BatchPart[Any]:
    from aioserve.runner.batch.prompt_rows import PromptRows

    return PromptRows()


def _pooled_rows() -> BatchPart[Any]:
    from aioserve.runner.batch.prompt_rows import PooledRows

    return PooledRows()
