"""Greedy tokens of `transformers`, to compare ours with: exact in float32, within rounding in less.

With two bytes a number, the two best tokens are often nearer to each other than two correct sums
are: which of them comes is chance, and everything after it too. So there every token is judged by
the logits that the reference gives for what came before it, in its type and in float32.
"""

import copy
from pathlib import Path
from typing import Any, cast

import torch

# How far a token's logit may be below the best, in standard deviations of all logits. Measured on
# the models of `tests.models`, with all kernels: 0.08 in bfloat16 and 0.005 in float16. The second
# best is 0.2 below the best in the middle; the median of all is 3 below.
MARGIN = {torch.bfloat16: 0.16, torch.float16: 0.02}
# Which experts a token goes to may be chance as well, and then its logits are others altogether.
MOST_SURPRISES = 0.25


class GreedyReference:
    """A model directory, in one element type."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self.dtype = dtype
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        self._has_experts = "expert" in " ".join(dict(self._model.named_parameters()))

    def tokens(self, prompt: list[int], num_tokens: int) -> "list[int] | GreedyTokens":
        """What equals so many greedy tokens after `prompt`."""
        if self.dtype != torch.float32:
            return GreedyTokens(self, prompt, num_tokens)
        ids = torch.tensor([prompt])
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens

    @torch.inference_mode()
    def states(self, prompt: list[int]) -> torch.Tensor:
        """`last_hidden_state` [T, hidden], in float32."""
        output = self._model.base_model(torch.tensor([prompt]), use_cache=False)
        return cast(torch.Tensor, output.last_hidden_state[0].float())

    @torch.inference_mode()
    def surprises(self, prompt: list[int], tokens: list[int]) -> list[int]:
        """Places of tokens that are too far from the best one, as far as that is no chance."""
        if not tokens:
            return []
        found = self._surprises(self._model, prompt, tokens)
        if found:  # the reference rounds as well: 0.23 off where ours is 0.05 off float32's logits
            exact = self._surprises(copy.deepcopy(self._model).float(), prompt, tokens)
            found = [place for place in found if place in exact]
        if self._has_experts and len(found) <= max(2, MOST_SURPRISES * len(tokens)):
            return []
        return found

    def _surprises(self, model: Any, prompt: list[int], tokens: list[int]) -> list[int]:
        logits = model(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits
        logits = logits[0, len(prompt) - 1 :].float()
        gap = logits.amax(1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        found: list[int] = (~(gap <= MARGIN[self.dtype] * logits.std(1))).nonzero()[:, 0].tolist()
        return found


class GreedyTokens:
    """Equal to every list of tokens that is greedy within rounding."""

    def __init__(self, reference: GreedyReference, prompt: list[int], num_tokens: int) -> None:
        self._reference, self._prompt, self._num_tokens = reference, prompt, num_tokens
        self._seen: dict[tuple[int, ...], list[int]] = {}

    def __eq__(self, tokens: object) -> bool:
        if not isinstance(tokens, list) or len(tokens) != self._num_tokens:
            return False
        key = tuple(tokens)
        if key not in self._seen:
            self._seen[key] = self._reference.surprises(self._prompt, tokens)
        return not self._seen[key]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        surprises = [places for places in self._seen.values() if places]
        return f"{self._num_tokens} greedy tokens within rounding; surprises at {surprises}"
