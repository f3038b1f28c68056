"""Sampling parameters at the engine's door: what vocabulary, tokenizer and runner allow.

Knows token ids, and words as the tokenizer spells them. Knows nothing about prompts.
"""

import random
from collections.abc import Callable, Collection, Sequence

import msgspec

from aioserve.engine.admission.budget_validator import spell_budget
from aioserve.errors import RequestError
from aioserve.model_info import ModelInfo
from aioserve.params import MAX_BAD_WORD_TOKENS, SamplingParams
from aioserve.runner.info import RunnerInfo

NO_TOKENIZER = "this engine has no tokenizer (skip_tokenizer_init)"


class SamplingValidator:
    """Completes parameters, or raises `RequestError`."""

    def __init__(
        self,
        model_info: ModelInfo,
        seed: int,
        encode: Callable[[str], list[int]],
        decode: Callable[[list[int]], str],
        *,
        runner_info: RunnerInfo,
    ) -> None:
        """`encode` gives the token ids of a word, where there is a tokenizer, and `decode` its
        text. `seed` is where the seeds of requests without one come from.
        """
        self._runner_info = runner_info
        self._encode, self._decode = encode, decode
        self._has_tokenizer = not model_info.config.skip_tokenizer_init
        self._vocab_size = model_info.vocab_size
        self._eos_token_ids = frozenset(model_info.eos_token_ids)
        self._random = random.Random(seed)

    def complete(self, params: SamplingParams) -> SamplingParams:
        """Check token ids against the vocabulary, look bad words up in it, and give a request that
        draws a seed of its own. Raises `RequestError`.
        """
        if params.detokenize and not self._has_tokenizer:
            raise RequestError(f"{NO_TOKENIZER}: set detokenize=False", param="detokenize")
        if params.prompt_logprobs is not None and not self._runner_info.supports_prompt_logprobs:
            raise RequestError(
                "prompt_logprobs cannot be served: this engine's runner, or this model, does not "
                "give the logits of prompts",
                param="prompt_logprobs",
            )
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            self._check_known(name, getattr(params, name) or ())
        for token_ids in params.bad_words_ids:
            self._check_known("bad_words_ids", token_ids)
        if params.bad_words:
            bad = tuple(dict.fromkeys([*params.bad_words_ids, *self._spell(params.bad_words)]))
            params = msgspec.structs.replace(params, bad_words_ids=bad, bad_words=())
        if params.thinking_budget is not None and self._has_tokenizer:
            params = spell_budget(params, self._encode, self._decode)
        if params.min_tokens and params.allowed_token_ids:
            ending = set(params.stop_token_ids)
            if not params.ignore_eos:
                ending |= self._eos_token_ids
            if ending.issuperset(params.allowed_token_ids):
                raise RequestError(
                    "allowed_token_ids holds nothing but stop tokens, and min_tokens "
                    f"({params.min_tokens}) forbids them: nothing is left",
                    param="allowed_token_ids",
                )
        if params.seed is None and not params.is_greedy:
            return msgspec.structs.replace(params, seed=self._random.getrandbits(62))
        return params

    def _check_known(self, name: str, token_ids: Collection[int]) -> None:
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
            unknown = next(i for i in token_ids if not 0 <= i < self._vocab_size)
            raise RequestError(
                f"{name} names token {unknown}, but the vocabulary has {self._vocab_size} tokens",
                param=name,
            )

    def _spell(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """How each of `words` may be said: after something else, and after a space."""
        if not self._has_tokenizer:
            raise RequestError(f"{NO_TOKENIZER}: give bad_words_ids", param="bad_words")
        spelled = []
        for word in words:
            for text in (word, f" {word.lstrip()}"):
                token_ids = tuple(self._encode(text))
                if len(token_ids) > MAX_BAD_WORD_TOKENS:
                    raise RequestError(
                        f"bad_words must have at most {MAX_BAD_WORD_TOKENS} tokens each, {text!r} "
                        f"has {len(token_ids)}",
                        param="bad_words",
                    )
                self._check_known("bad_words", token_ids)
                if token_ids:
                    spelled.append(token_ids)
        return spelled
