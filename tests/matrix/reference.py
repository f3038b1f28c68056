"""What `transformers` says of a reply: each token must be the most likely one after those before.

By induction such a reply is the greedy one. One pass of the library's module checks a whole reply,
whatever was asked for: what each field of a request does to logits is done here again, in plain
torch. Of a grammar, whose texts are few, the tokens that may come next are found by trying all.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aioserve.outputs import RequestOutput, TokenLogprobs
from tests.matrix.asks import BUDGET, FREQUENCY, PRESENCE, REPETITION, STOPS, Ask
from tests.matrix.built import EOS, BuiltModel

#: How far a token's logit may be below the best, and a number beside that of the library.
ROUNDING = 2e-3


@dataclass
class Reference:
    """One model by `transformers`, merged with its adapter and without."""

    model: BuiltModel
    prompts: Sequence[Any]  # token ids, or a text and its images
    _modules: dict[bool, Any] = field(default_factory=dict)
    _seen: dict[Any, str | None] = field(default_factory=dict)

    def wrong(self, ask: Ask, replies: Sequence[RequestOutput]) -> str | None:
        """What is wrong with the samples of a request; None: nothing."""
        for reply in replies:
            key = ask, tuple(reply.token_ids), reply.finish_reason
            if key not in self._seen or reply.logprobs or reply.prompt_logprobs:
                self._seen[key] = self._wrong(ask, reply)
            if (what := self._seen[key]) is not None:
                return f"{ask}: {what}"
        return None

    def wrong_vector(self, ask: Ask, vector: Any) -> str | None:
        """What is wrong with the mean of the states of a prompt, as long as 1; None: nothing."""
        module = self._module(ask.is_adapted)
        given = self._given(ask, ())
        with torch.inference_mode():
            states = module.model(**given, use_cache=False).last_hidden_state[0]
        mean = states.float().mean(0)
        far = np.abs((mean / mean.norm()).numpy() - vector).max()
        return None if far < ROUNDING else f"{ask}: its vector is {far:.2g} away"

    def _wrong(self, ask: Ask, reply: RequestOutput) -> str | None:
        tokens = reply.token_ids
        if not tokens:
            return f"no token, ended by {reply.finish_reason}"
        prompt, logits = self._logits(ask, tokens)
        raw = logits[len(prompt) - 1 :]
        if "stop strings" in ask.kinds and (what := self._wrong_stop(ask, reply)) is not None:
            return what
        mark = self._mark() if "thinking budget" in ask.kinds else []
        end = BUDGET.max_tokens + len(mark)
        if tokens[BUDGET.max_tokens : end] != mark[: len(tokens) - BUDGET.max_tokens] and mark:
            return f"{tokens} have no end mark {mark} behind the reasoning"
        for place, (token, row) in enumerate(zip(tokens, raw, strict=True)):
            if mark and BUDGET.max_tokens <= place < end:
                continue
            if "penalties" in ask.kinds:
                row = _penalized(row, prompt, tokens[:place])
            allowed = None
            if ask.texts is not None:
                allowed = self._allowed(ask.texts, tokens[:place], token)
                if allowed is None:  # the grammar leaves no other text
                    continue
                if token not in allowed:
                    return f"token {place} of {tokens} is not allowed by the grammar"
                row = row[sorted(allowed)]
            best, own = row.max(), row[sorted(allowed).index(token) if allowed else token]
            if "seeded sampling" not in ask.kinds and not own >= best - ROUNDING:
                return f"token {place} of {tokens} is {best - own:.3g} below the best"
        return self._wrong_logprobs(reply, prompt, logits)

    def _wrong_logprobs(
        self, reply: RequestOutput, prompt: list[int], logits: Tensor
    ) -> str | None:
        for name, told, tokens, rows in (
            ("logprobs", reply.logprobs, reply.token_ids, logits[len(prompt) - 1 :]),
            ("prompt_logprobs", (reply.prompt_logprobs or [])[1:], prompt[1:], logits),
        ):
            if told and len(told) != len(tokens):
                return f"{name}: of {len(told)} tokens, not of {len(tokens)}"
            for entry, token, row in zip(told or (), tokens, rows, strict=False):
                assert isinstance(entry, TokenLogprobs)
                expected = row.log_softmax(-1)
                top = expected[entry.top_token_ids]
                if abs(entry.logprob - float(expected[token])) > ROUNDING:
                    return f"{name}: {entry.logprob:.4f} is {expected[token]:.4f}"
                if (top - torch.tensor(entry.top_logprobs)).abs().max() > ROUNDING:
                    return f"{name}: {entry.top_logprobs} are {top.tolist()}"
                if (top - expected.topk(len(top)).values).abs().max() > ROUNDING:
                    return f"{name}: {entry.top_token_ids} are not the most likely"
        return None

    def _wrong_stop(self, ask: Ask, reply: RequestOutput) -> str | None:
        """What is wrong with where a reply ends: at the first stop string, if there is one."""
        pieces = _pieces(self.model)
        told = [pieces.get(token, "") for token in reply.token_ids[ask.min_tokens :]]
        stops = [{stop for stop in STOPS if stop in piece} for piece in told]
        found = stops[-1] if stops else set()
        if any(stops[:-1]) or bool(found) != (reply.stop_reason in STOPS):
            return f"a stop string in {told} is overlooked, or ended by {reply.stop_reason!r}"
        if found and (reply.stop_reason not in found or reply.text.endswith(told[-1])):
            return f"{reply.text!r} is not cut at {found} of {told[-1]!r}"
        return None

    def _mark(self) -> list[int]:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.model.path)
        mark: list[int] = tokenizer.encode(BUDGET.text, add_special_tokens=False)
        return mark

    def _logits(self, ask: Ask, tokens: Sequence[int]) -> tuple[list[int], Tensor]:
        """The prompt's tokens, and logits [T, V] of it and of all of `tokens` but the last."""
        given, module = self._given(ask, tokens[:-1]), self._module(ask.is_adapted)
        if hasattr(module.model, "rope_deltas"):
            module.model.rope_deltas = None  # of a prompt before
        with torch.inference_mode():
            logits: Tensor = module(**given, use_cache=False).logits[0].float()
        ids: list[int] = given["input_ids"][0].tolist()
        return ids[: len(ids) - len(tokens) + 1], logits

    def _given(self, ask: Ask, tokens: Sequence[int]) -> dict[str, Any]:
        prompt = self.prompts[ask.place]
        if self.model.seeing is not None:
            return self.model.seeing.given(*prompt, tokens)
        return {"input_ids": torch.tensor([[*prompt, *tokens]])}

    def _module(self, is_adapted: bool) -> Any:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        if is_adapted not in self._modules:
            sees = self.model.seeing is not None
            kind: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
            path = self.model.merged if is_adapted else self.model.path
            self._modules[is_adapted] = kind.from_pretrained(path, dtype=torch.float32).eval()
        return self._modules[is_adapted]

    def _allowed(self, texts: Sequence[str], said: Sequence[int], token: int) -> set[int] | None:
        """Tokens that may come behind `said`; None if `token` is the beginning of all that may."""
        pieces = _pieces(self.model)
        before = "".join(pieces.get(one, "") for one in said)
        rest = [text[len(before) :] for text in texts if text.startswith(before)]
        own = pieces.get(token)
        if own and all(text.startswith(own) for text in rest):
            return None
        allowed = {one for one, piece in pieces.items() if any(t.startswith(piece) for t in rest)}
        return allowed | ({EOS} if "" in rest else set())


def _penalized(row: Tensor, prompt: Sequence[int], said: Sequence[int]) -> Tensor:
    """Repetition as in `transformers`, over all tokens; presence and frequency over the reply."""
    row, all_ids = row.clone(), torch.tensor([*prompt, *said])
    seen = row[all_ids]
    row[all_ids] = torch.where(seen < 0, seen * REPETITION, seen / REPETITION)
    counts = torch.bincount(torch.tensor([*said], dtype=torch.long), minlength=len(row))
    return row - PRESENCE * (counts > 0) - FREQUENCY * counts


_PIECES: dict[str, dict[int, str]] = {}


def _pieces(model: BuiltModel) -> dict[int, str]:
    """The text of each token that is text alone, by its id."""
    from transformers import AutoTokenizer

    key = f"{model.name if model.seeing is not None else ''} {model.has_added}"
    if key not in _PIECES:
        tokenizer = AutoTokenizer.from_pretrained(model.path)
        special = {*tokenizer.all_special_ids}
        texts: Iterator[tuple[int, str]] = (
            (token, tokenizer.decode([token])) for token in range(len(tokenizer))
        )
        _PIECES[key] = {
            token: text
            for token, text in texts
            if token not in special and re.fullmatch(r"[\x09-\x7e]+", text)
        }
    return _PIECES[key]
