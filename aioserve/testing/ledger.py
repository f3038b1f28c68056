"""What every request asked for, the tokens it has to get, and what it got, seen from outside.

Knows tokens, clients and endings. Knows nothing about steps, blocks or the scheduler's state.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any
from zlib import crc32

from aioserve.errors import RequestError
from aioserve.outputs import EngineCoreOutput, EngineCoreOutputs, FinishReason, ModelRunnerOutput
from aioserve.params import StructuredOutputs
from aioserve.request import Request
from aioserve.testing.violation import ContractViolation

VOCAB_SIZE = 50

Drafter = Callable[[Sequence[int]], list[int]]


@dataclass(frozen=True, slots=True)
class Masked:
    """A reply that is one of some texts and then an EOS token, each character a token.

    Where they leave no choice, tokens come at once, as from the real runner's grammars.
    """

    choices: tuple[tuple[int, ...], ...]
    eos_token_ids: tuple[int, ...]

    @classmethod
    def by(cls, wanted: StructuredOutputs, eos_token_ids: Collection[int]) -> "Masked":
        """Raises `RequestError` for what no toy can compile."""
        if wanted.choice is None or not eos_token_ids:
            raise RequestError("toys know structured_outputs.choice alone, and need an EOS token")
        choices = tuple(
            tuple((ord(char) - 96) % VOCAB_SIZE for char in text) for text in wanted.choice
        )
        return cls(choices, tuple(eos_token_ids))

    def allowed(self, said: Sequence[int]) -> list[int]:
        """Return the mask after these tokens. Behind the end another end may follow, and nothing
        else.
        """
        begun = [own for own in self.choices if own[: len(said)] == tuple(said)]
        tokens = {own[len(said)] for own in begun if len(own) > len(said)}
        if len(tokens) == 0 or tuple(said) in begun:
            tokens.update(self.eos_token_ids)
        return sorted(tokens)

    def next_of(self, token_ids: Sequence[int], num_prompt_tokens: int) -> list[int]:
        """Return the tokens that have no alternative, if any, and the one after them."""
        sequence = list(token_ids)
        while True:
            allowed = self.allowed(sequence[num_prompt_tokens:])
            sequence.append(allowed[next_token(sequence) % len(allowed)])
            if len(allowed) > 1 or allowed[0] in self.eos_token_ids:
                return sequence[len(token_ids) :]


#: What a request is to get: tokens, of which those of a list come at once, as draft tokens that
#: turn out right, if the scheduler grants them; or by a mask.
Reply = Sequence[int | Sequence[int]] | Masked


def next_token(token_ids: Sequence[int]) -> int:
    """Return the token that follows: any fixed function of the whole sequence will do."""
    return crc32(repr(list(token_ids)).encode()) % VOCAB_SIZE


def next_of_reply(token_ids: Sequence[int], num_prompt_tokens: int, reply: Reply) -> list[int]:
    """Return what follows, by a reply and after its end by `next_token`: one token, or what is left
    of those that come at once. Of several the last is no draft.
    """
    if isinstance(reply, Masked):
        return reply.next_of(token_ids, num_prompt_tokens)
    position = len(token_ids) - num_prompt_tokens
    for item in reply:
        together = [item] if isinstance(item, int) else list(item)
        if position < len(together):
            return together[position:]
        position -= len(together)
    return [next_token(token_ids)]


def guess(token_ids: Sequence[int]) -> list[int]:
    """Draft tokens, zero to four, of which some are right: a `Drafter`."""
    dice = crc32(repr(list(token_ids[-3:])).encode())
    num_right, num_wrong = dice % 3, dice // 3 % 3
    sequence = list(token_ids)
    for _ in range(num_right):
        sequence.append(next_token(sequence))
    for _ in range(num_wrong):
        sequence.append((next_token(sequence) + 1) % VOCAB_SIZE)
    return sequence[len(token_ids) :]


# What every request asked for and what it got, seen from outside. Knows tokens, clients and
# endings. Knows nothing about steps, blocks or the scheduler's state.


#: What a client says of its request: no policy may write to it.
STATED = ("priority", "user", "hints", "arrival_time", "deadline", "cache_salt", "adapter_id")


#: The values of `STATED`, as they are now.
read_stated = attrgetter(*STATED)


def stated(request: Request) -> tuple[Any, ...]:
    """Return the values of `STATED`; of hints a copy."""
    values = read_stated(request)
    return tuple(dict(value) if isinstance(value, dict) else value for value in values)


@dataclass(slots=True, eq=False)
class Life:
    """One request from its arrival to its end."""

    request: Request
    prompt: list[int]
    max_total_tokens: int  # prompt and output, by the model's limit and its own
    reply: Reply  # what it is to get
    tokens: list[int] = field(default_factory=list)  # received
    finish_reason: FinishReason | None = None
    was_scheduled: bool = False
    stated: tuple[Any, ...] = ()  # what its client said, in the order of `STATED`

    @property
    def request_id(self) -> str:
        """The id of the request; a later life may have the same."""
        return self.request.request_id

    @property
    def is_alive(self) -> bool:
        """Whether it was accepted and has not ended."""
        return self.finish_reason is None

    def expected_end(self) -> tuple[FinishReason | None, int | None]:
        """Finish reason and stop reason, now that `tokens` are there."""
        params, last = self.request.sampling_params, self.tokens[-1]
        if last in self.request.stop_token_ids and len(self.tokens) > params.min_tokens:
            return FinishReason.STOP, last if last in params.stop_token_ids else None
        if len(self.prompt) + len(self.tokens) >= self.max_total_tokens:
            return FinishReason.LENGTH, None
        return None, None


class Ledger:
    """All requests, living and ended. Raises `ContractViolation`."""

    def __init__(self, *, foretells: bool = True) -> None:
        """With `foretells`, tokens and vectors are a `ToyRunner`'s, and known before they come."""
        self._foretells = foretells
        self.lives: dict[str, Life] = {}  # the latest of each name
        self.alive: dict[str, Life] = {}  # those that wait or run, in order of arrival
        self.untold: dict[str, list[Life]] = {}  # ended, and the runner may not know it yet
        self.num_steps = 0  # that were planned
        self.first_end: int | None = None  # how many were planned when the first request ended

    def open(self, request: Request, max_model_len: int, reply: Reply = ()) -> None:
        """Note that a request was accepted."""
        prompt, max_tokens = list(request.token_ids), request.sampling_params.max_tokens
        if request.pooling_params is not None:  # room for a token that never comes
            max_model_len, max_tokens = max_model_len + 1, 1
        limit = max_model_len if max_tokens is None else len(prompt) + max_tokens
        life = Life(request, prompt, min(limit, max_model_len), reply)
        life.stated = stated(request)
        self.lives[request.request_id] = self.alive[request.request_id] = life

    def end(
        self, request_ids: Iterable[str] | None, ended: list[str], reason: FinishReason, where: str
    ) -> None:
        """`finish_requests` was asked to end some (None: all) and answered `ended`."""
        if not isinstance(ended, list):
            raise ContractViolation(
                f"{where}: finish_requests must return a list of the ids that ended, got {ended!r}"
            )
        asked = self.alive.keys() if request_ids is None else set(request_ids)
        expected = self.alive.keys() & asked
        if missing := expected - set(ended):
            raise ContractViolation(
                f"{where}: finish_requests did not return {sorted(missing)}, which it should have "
                "ended"
            )
        if len(ended) != len(expected):
            raise ContractViolation(
                f"{where}: finish_requests returned {ended}, but only {sorted(expected)} ended"
            )
        for request_id in ended:
            self._close(self.lives[request_id], reason)

    def receive(
        self,
        lives: Mapping[str, Life],
        result: ModelRunnerOutput,
        outputs: Mapping[int, EngineCoreOutputs],
        where: str,
        dropped: Collection[str] = (),
    ) -> None:
        """`update_from_output` made `outputs` of the `result` of a step that carried `lives`; what
        was sampled for the `dropped` need not be among them.
        """
        if not isinstance(outputs, Mapping):
            raise ContractViolation(
                f"{where}: update_from_output must return outputs by client index, got {outputs!r}"
            )
        sampled = {
            request_id: token_ids
            for request_id, token_ids in zip(result.req_ids, result.sampled_token_ids, strict=True)
            if (token_ids or request_id in result.pooled) and lives[request_id].is_alive
        }
        for client_index, batch in outputs.items():
            for item in batch.outputs:
                life = lives.get(item.request_id)
                if life is not None and not life.is_alive:
                    raise ContractViolation(f"{where}: {item.request_id} got tokens after its end")
                if life is None or item.request_id not in sampled:
                    raise ContractViolation(
                        f"{where}: {item.request_id} got an output, but none was sampled"
                    )
                if life.request.client_index != client_index:
                    raise ContractViolation(
                        f"{where}: {item.request_id} of client {life.request.client_index} was "
                        f"delivered to client {client_index}"
                    )
                self._append(life, sampled.pop(item.request_id), item, where)
        if sampled.keys() - set(dropped):
            raise ContractViolation(
                f"{where}: tokens of {sorted(sampled)} were sampled, but not delivered"
            )

    def _append(self, life: Life, sampled: list[int], item: EngineCoreOutput, where: str) -> None:
        expected: list[int] = []
        reason = stop_reason = None
        if life.request.pooling_params is not None:
            reason = FinishReason.STOP
            self._check_vector(life, item, where)
        for token_id in sampled:
            self._check_token(life, token_id, where)
            life.tokens.append(token_id)
            expected.append(token_id)
            reason, stop_reason = life.expected_end()
            if reason is not None:
                break
        if item.new_token_ids != expected:
            raise ContractViolation(
                f"{where}: {life.request_id} was delivered tokens {item.new_token_ids}, due were "
                f"{expected}"
            )
        told = [entry.top_token_ids[0] for entry in item.new_logprobs or ()]
        if item.new_logprobs is not None and told != expected:
            raise ContractViolation(
                f"{where}: {life.request_id} was delivered tokens {expected} and log probabilities "
                f"of {told}"
            )
        if (item.finish_reason, item.stop_reason) != (reason, stop_reason):
            raise ContractViolation(
                f"{where}: after its output token {len(life.tokens)}, {life.request_id} has finish "
                f"and stop reason {_name(item.finish_reason)}, {item.stop_reason}; due are "
                f"{_name(reason)}, {stop_reason}"
            )
        if reason is not None:
            self._close(life, reason)

    def _check_vector(self, life: Life, item: EngineCoreOutput, where: str) -> None:
        """The toy runner's vectors are the tokens whose states were pooled."""
        if not self._foretells:
            return
        params = life.request.pooling_params
        expected = life.prompt if params and params.pooling == "mean" else life.prompt[-1:]
        if item.embedding != expected:
            raise ContractViolation(
                f"{where}: {life.request_id} was delivered the states of {item.embedding}, due "
                f"were those of {expected}"
            )

    def _close(self, life: Life, reason: FinishReason) -> None:
        life.finish_reason = reason
        if self.first_end is None:
            self.first_end = self.num_steps
        del self.alive[life.request_id]
        self.untold.setdefault(life.request_id, []).append(life)

    def tell(self, request_id: str, where: str) -> None:
        """The runner is told that this request has ended."""
        untold = self.untold.get(request_id)
        if not untold:
            life = self.lives.get(request_id)
            state = "unknown" if life is None else "alive" if life.is_alive else "told already"
            raise ContractViolation(f"{where}: {request_id} is in finished_req_ids, but {state}")
        untold.pop(0)
        if not untold:
            del self.untold[request_id]

    def _check_token(self, life: Life, token_id: int, where: str) -> None:
        if not self._foretells:
            return
        alone = next_of_reply(life.prompt + life.tokens, len(life.prompt), life.reply)[0]
        if token_id != alone:
            raise ContractViolation(
                f"{where}: {life.request_id}: output token {len(life.tokens)} is {token_id}, "
                f"alone it would be {alone}"
            )


def _name(reason: FinishReason | None) -> str:
    return "none" if reason is None else f"{reason.value!r}"
