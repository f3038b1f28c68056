"""Which parts the batch of a runner has, on either side: a new part gets its line here."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aioserve.kv_cache import WindowSpec
from aioserve.runner.batch.adapter_rows import AdapterRows
from aioserve.runner.batch.grammar_rows import GrammarRows
from aioserve.runner.batch.input_batch import BatchPart
from aioserve.runner.batch.prompt_rows import PooledRows, PromptRows
from aioserve.runner.batch.sampling_columns import SamplingColumns
from aioserve.runner.batch.state_rows import StateRows, WindowRows
from aioserve.runner.batch.thinking_rows import ThinkingRows
from aioserve.runner.served_model import ServedModel
from aioserve.runner.spec_decode.drafter import Drafter, DraftRows

if TYPE_CHECKING:
    from aioserve.grammars import GrammarCompiler


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
        grammars: "GrammarCompiler | None" = None,
        eos_token_ids: Sequence[int] = (),
        drafter: Drafter | None = None,
        windows: WindowSpec | None = None,
    ) -> None:
        """Without `grammars`, no request may ask for structured outputs or thinking budgets."""
        self.sizes = max_num_seqs, max_model_len, block_size  # as `InputBatch` takes them
        self.sampling = SamplingColumns(max_num_seqs, vocab_size)
        self.grammars = GrammarRows(grammars, vocab_size, eos_token_ids)
        self.adapters = AdapterRows()
        self.drafts = DraftRows(drafter, self.sampling, self.grammars)
        parts: list[BatchPart[Any] | None] = [
            self.sampling,
            PromptRows(),
            PooledRows(),
            self.adapters,
            model.image_encoder,
            None if model.states is None else StateRows(max_num_seqs, model.states.take_back),
            None if windows is None else WindowRows(max_num_seqs, max_model_len, block_size),
            self.grammars,
            ThinkingRows(grammars, self.grammars),
            None if drafter is None else self.drafts,
        ]
        self.all = tuple(part for part in parts if part is not None)
