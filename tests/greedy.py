"""Greedy tokens of `transformers`, to compare ours with: exact in float32, within rounding in less.

Every token is judged by the logits that the reference gives for what came before it: if each is the
best one, together they are what it would have said, and one pass over all of them takes a fraction
of the time in which it says them. With two bytes a number, the two best tokens are often nearer to
each other than two correct sums are: which of them comes is chance, and everything after it too. So
there a token is judged in its type and in float32.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast, overload

import torch

# How far a token's logit may be below the best, in standard deviations of all logits. Measured on
# the models of `tests.models`, with all kernels: 0.08 in bfloat16 and 0.005 in float16. The second
# best is 0.2 below the best in the middle; the median of all is 3 below.
MARGIN = {torch.bfloat16: 0.16, torch.float16: 0.02, torch.float32: 1e-5}
# Which experts a token goes to may be chance as well, and then its logits are others altogether.
MOST_SURPRISES = 0.25


class GreedyReference:
    """A model directory, in one element type."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self.dtype = dtype
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        self._has_experts = "expert" in " ".join(dict(self._model.named_parameters()))

    def tokens(self, prompt: list[int], num_tokens: int) -> "GreedyTokens":
        """An object that equals the greedy tokens after `prompt`."""
        return GreedyTokens(
            num_tokens, partial(self.surprises, prompt), partial(self.generate, prompt, num_tokens)
        )

    def generate(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The greedy tokens after `prompt`, one after the other as `generate` gives them."""
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
        if self.dtype == torch.float32:
            return found
        if found:  # the reference rounds as well: 0.23 off where ours is 0.05 off float32's logits
            exact = self._surprises(copy.deepcopy(self._model).float(), prompt, tokens)
            found = [place for place in found if place in exact]
        if self._has_experts and len(found) <= max(2, MOST_SURPRISES * len(tokens)):
            return []
        return found

    def _surprises(self, model: Any, prompt: list[int], tokens: list[int]) -> list[int]:
        logits = model(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits
        return surprises(logits[0, len(prompt) - 1 :], tokens, self.dtype)


def surprises(logits: torch.Tensor, tokens: list[int], dtype: torch.dtype) -> list[int]:
    """Places of tokens that are too far from the best one of their logits, [n, V]."""
    logits = logits.float()
    gap = logits.amax(1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    found: list[int] = (~(gap <= MARGIN[dtype] * logits.std(1))).nonzero()[:, 0].tolist()
    return found


class GreedyTokens(Sequence[int]):
    """Equal to every list of as many tokens in which nothing surprises, and made of the first such
    list, or of what is generated.
    """

    def __init__(
        self,
        num_tokens: int,
        surprises: Callable[[list[int]], list[int]],
        generate: Callable[[], list[int]],
    ) -> None:
        self._num_tokens, self._surprises, self._generate = num_tokens, surprises, generate
        self._seen: dict[tuple[int, ...], list[int]] = {}

    def __eq__(self, tokens: object) -> bool:
        if isinstance(tokens, GreedyTokens):
            tokens = list(tokens)
        if not isinstance(tokens, list) or len(tokens) != self._num_tokens:
            return False
        key = tuple(tokens)
        if key not in self._seen:
            self._seen[key] = self._surprises(tokens)
        return not self._seen[key]

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return self._num_tokens

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> list[int]: ...
    def __getitem__(self, place: int | slice) -> int | list[int]:
        if not any(surprises == [] for surprises in self._seen.values()):
            self._seen[tuple(self._generate())] = []
        first = next(tokens for tokens, surprises in self._seen.items() if not surprises)
        return list(first)[place]

    def __repr__(self) -> str:
        surprises = [places for places in self._seen.values() if places]
        return f"{self._num_tokens} greedy tokens within rounding; surprises at {surprises}"
