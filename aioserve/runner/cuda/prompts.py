"""How likely the tokens of prompts are, on a device: staged with a step, read after it.

Knows a model and numbers; knows nothing about requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from aioserve.outputs import TokenLogprobs
from aioserve.runner.batch.prompt_logprobs import WantedLogprobs
from aioserve.runner.cuda.plan import StepPlan, Words
from aioserve.runner.cuda.sampler import DeviceSampler, read_logprobs, write_logprobs
from aioserve.runner.low_rank import TokenAdapters
from aioserve.runner.served_model import Halves


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """What one step is asked about prompts, at N of its T tokens."""

    wanted: WantedLogprobs
    places: Words  # N, of the T
    rows: Tensor  # `places` on the device
    token_ids: Tensor  # N, int32 on the device
    width: int  # alternatives, of the rows that want most
    vocab_size: int
    found: Tensor  # int32 on the device: the answer

    @property
    def pieces(self) -> list[slice]:
        """The N in pieces that are looked at one after another."""
        return self.wanted.pieces(self.vocab_size)

    def look(self, model: Halves, states: Tensor, adapters: Sequence[TokenAdapters] = ()) -> None:
        """Fill `found` from the hidden states [N, hidden]; on the device. `adapters`: of each of
        the `pieces`, if any row has one.
        """
        for number, piece in enumerate(self.pieces):
            token_ids, out = self.token_ids[piece].long(), self.found[self._begin(piece.start) :]
            logits = model.logits(states[piece], adapters[number] if adapters else None)
            write_logprobs(logits, token_ids, self.width, out)

    def read(self, words: Words) -> dict[str, list[TokenLogprobs]]:
        """Of prompts that are complete, from a copy of `found`; to be called in order of steps."""
        found: list[TokenLogprobs] = []
        for piece in self.pieces:
            own = words[self._begin(piece.start) : self._begin(piece.stop)]
            found += read_logprobs(own, self.wanted.num_logprobs[piece], self.width)
        return self.wanted.keep(found)

    def _begin(self, number: int) -> int:
        return number * (2 + 2 * self.width)


def plan_prompts(
    wanted: WantedLogprobs | None, plan: StepPlan, sampler: DeviceSampler
) -> PromptPlan | None:
    """Stage what is wanted of the step of `plan`; None if nothing is."""
    if wanted is None:
        return None
    place_of = np.empty(len(plan.tokens), dtype=np.int32)
    place_of[plan.tokens] = np.arange(len(plan.tokens))
    places = place_of[wanted.places]
    staged = sampler.stage({"rows": places, "token_ids": wanted.token_ids.astype(np.int32)})
    width = min(max(wanted.num_logprobs, default=0), sampler.vocab_size)
    found = staged["rows"].new_empty(max(1, len(wanted.places) * (2 + 2 * width)))
    return PromptPlan(
        wanted, places, staged["rows"], staged["token_ids"], width, sampler.vocab_size, found
    )
