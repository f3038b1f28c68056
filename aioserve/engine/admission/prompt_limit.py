"""How long a prompt may be, and how much of it is kept: by what is asked for, in tokens.

Knows numbers. Knows no tokenizer and no prompt.
"""

from typing import NamedTuple

from aioserve.errors import RequestError
from aioserve.params import PoolingParams, SamplingParams


class PromptLimit(NamedTuple):
    """What the model has for one prompt."""

    limit: int  # the most tokens that it may have
    in_words: str
    keep: int | None = None  # tokens of the end that are kept; None: all

    @classmethod
    def of(cls, params: SamplingParams | PoolingParams, max_model_len: int) -> "PromptLimit":
        """What `params` leave to the prompt. One that is pooled may fill the model."""
        keep = params.truncate_prompt_tokens
        if isinstance(params, PoolingParams):
            keep = max_model_len if keep == -1 else keep
            return cls(max_model_len, str(max_model_len), keep)
        if keep == -1:
            keep = max(1, max_model_len - (params.max_tokens or 1))
        return cls(max_model_len - 1, f"{max_model_len} for prompt and output together", keep)

    def kept(self, num_tokens: int) -> int:
        """How many tokens are kept of a prompt of this length."""
        return num_tokens if self.keep is None else min(num_tokens, self.keep)

    def cut(self, token_ids: list[int]) -> list[int]:
        """The tokens that are kept of a prompt."""
        return token_ids if self.keep is None else token_ids[-self.keep :]

    def check(self, num_tokens: int, qualifier: str = "") -> None:
        """Raises `RequestError` for more than `limit`."""
        if num_tokens > self.limit:
            raise RequestError(
                f"the prompt has {qualifier}{num_tokens} tokens, but the model's limit is "
                f"{self.in_words}",
                param="prompt",
            )
