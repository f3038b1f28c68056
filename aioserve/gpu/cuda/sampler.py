"""Chooses the tokens of a step on the device, penalties and logprobs included.

Begins with the draw in plain torch, the definition that Triton kernels are tested against, in
which no branch depends on what is in a tensor. Ends with how likely the tokens of prompts are.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from aioserve.gpu.cuda.device import Device, StagingRing
from aioserve.gpu.cuda.plan import Sections, StepPlan, Words
from aioserve.outputs import TokenLogprobs, Vector
from aioserve.params import MAX_BAD_WORD_TOKENS, MAX_LOGPROBS, SamplingParams
from aioserve.runner.adapters import TokenAdapters
from aioserve.runner.attention.backend import IntArray
from aioserve.runner.batch.logits_edits import BAD, LogitsEdits
from aioserve.runner.batch.masks import Masks
from aioserve.runner.batch.prompt_rows import WantedLogprobs, WantedStates
from aioserve.runner.batch.sampling_columns import NO_LOGPROBS
from aioserve.runner.interface import NOT_FINITE
from aioserve.runner.served_model import Halves
from aioserve.scheduler.output import NewRequestData

_WORD = 0xFFFFFFFF


class DrawColumns(NamedTuple):
    """The columns by which each of the S rows is drawn; on the device."""

    temperature: Tensor  # float32, 0 = greedy
    top_k: Tensor  # int32, 0 = all
    top_p: Tensor  # float32
    min_p_floor: Tensor  # float32, log(min_p)
    keys: Tensor  # int32 [2, S], contiguous, bits of `sampling_columns.row_keys`
    has_top_k: bool  # whether any row has one
    has_top_p: bool


def draw(logits: Tensor, columns: DrawColumns) -> Tensor:
    """Token ids int64 [S] from `logits` [S, V] of any floating type, as `cpu.sampler.sample`."""
    heat = columns.temperature[:, None]
    scaled = logits.float() - logits.amax(dim=-1, keepdim=True).float()
    scaled = scaled / torch.where(heat > 0, heat, 1.0)
    floor = columns.min_p_floor
    if columns.has_top_k or columns.has_top_p:
        floor = torch.maximum(floor, lowest_kept(scaled, columns.top_k, columns.top_p))
    uniform = uniforms(columns.keys, logits.shape[1])
    score = scaled + uniform.log_().neg_().log_().neg_()
    score = score.masked_fill_(scaled < floor[:, None], float("-inf"))
    return torch.where(heat > 0, score, scaled).argmax(dim=-1)


def lowest_kept(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the smallest of `scaled` [S, V] that top-k, then top-p keep; equals are kept
    together.
    """
    size = scaled.shape[1]
    values = scaled.sort(dim=-1, descending=True).values
    last = torch.where(top_k > 0, top_k, size).clamp(max=size).long() - 1
    weights = values.double().exp() * (values >= values.gather(1, last[:, None]))
    mass = weights.cumsum(dim=1)
    target = torch.where(top_p < 1, top_p.double() * mass[:, -1], float("inf"))
    # what comes before a token that is kept lacks mass
    kept = (weights > 0) & (mass - weights < target[:, None])
    return values.gather(1, (kept.sum(dim=1, keepdim=True) - 1).clamp(min=0))[:, 0]  # one at least


def uniforms(keys: Tensor, size: int) -> Tensor:
    """Return `uniform(hash_tokens(keys, [0, size)))` of `sampling_columns`, float32 [S, size]."""
    key0, key1 = (keys.long() & _WORD).unsqueeze(2)
    token_ids = torch.arange(size, device=keys.device)
    words = _mix(_mix((token_ids + key0) & _WORD) ^ key1)
    return ((words >> 9).float() + 0.5) * 2**-23


def _mix(words: Tensor) -> Tensor:
    """Return what `sampling_columns.mix` does, on 32-bit words in int64, of whose products only
    the low bits are needed.
    """
    words = words ^ (words >> 16)
    words = (words * 0x7FEB352D) & _WORD
    words = words ^ (words >> 15)
    words = (words * 0x846CA68B) & _WORD
    return words ^ (words >> 16)


# Chooses the tokens of a step on the device, penalties and logprobs included. The host says
# beforehand what the rows ask for; nothing is read back before the step's one copy. The operations
# and their order are those of `runner.cpu.sampler`.


Draw = Callable[[Tensor, DrawColumns], Tensor]

_IN_PROMPT = 1 << 24  # in `DeviceSampler._seen`; below: how often a token is in the output
_NUM_RECENT = MAX_BAD_WORD_TOKENS - 1  # tokens of a bad word before its last
_NOTHING = -1  # in `DeviceSampler._recent`: the output is not that long yet
_ANYTHING = -2  # in the beginning of a bad word that is short
NO_TOKEN = -1  # in `DeviceSampler.out`: of a row whose best logit is not finite
_EDITS = {"penalties", "added", "bad_last", "allowed"}  # of `SamplePlan.extras`
_OUT_COLUMNS = 3 + 2 * MAX_LOGPROBS  # words per row: token, logprob, rank, alternatives


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """The plan of the host for the S rows of one step."""

    num_rows: int  # S
    is_greedy: bool  # all of them, and no edits
    has_top_k: bool
    has_top_p: bool
    asked: list[int]  # rows that want logprobs
    num_logprobs: list[int]  # how many alternatives each of those wants
    has_penalties: bool
    extras: dict[str, Tensor]  # on the device: what few steps need, by name

    @property
    def num_words(self) -> int:
        """Words of the result that the host reads: tokens, logprobs, ranks, alternatives."""
        return self.num_rows + len(self.asked) * (2 + 2 * max(self.num_logprobs, default=0))


@dataclass(frozen=True, slots=True)
class DeviceMasks:
    """The grammars' token `Masks` in device memory: which tokens M of the S rows may take."""

    places: Tensor  # M, int32
    words: Tensor  # [M, ceil(V / 32)], int32

    def apply(self, logits: Tensor) -> Tensor:
        """Return a copy of `logits` [S, V] with what is not allowed at minus infinity."""
        bits = torch.arange(32, dtype=torch.int32, device=self.words.device)
        allowed = (self.words[:, :, None] >> bits & 1).bool().flatten(1)[:, : logits.shape[1]]
        places = self.places.long()
        masked = logits[places].masked_fill(~allowed, float("-inf"))
        return logits.index_copy(0, places, masked)


class DeviceSampler:
    """Keeps, per slot of the batch, the last token and which tokens were seen how often."""

    def __init__(
        self, device: Device, num_slots: int, num_samples: int, vocab_size: int, draw: Draw
    ) -> None:
        """`num_samples`: of one step; more than `num_slots` if drafts are verified."""
        self._device = device
        self.vocab_size = vocab_size
        self._draw = draw
        self._ring = StagingRing(device, 1)  # grows
        self._ring_size = 1
        self.last_token = torch.zeros(num_slots, dtype=torch.int64, device=device.torch_device)
        # made now, not when a request asks: the memory may be gone then
        self._seen = torch.zeros(
            num_slots, vocab_size, dtype=torch.int32, device=device.torch_device
        )
        self._recent = torch.zeros(  # said last, in rows that have bad words of several tokens
            num_slots, _NUM_RECENT, dtype=torch.int32, device=device.torch_device
        )
        self.out = torch.zeros(
            num_samples * _OUT_COLUMNS, dtype=torch.int32, device=device.torch_device
        )

    @staticmethod
    def num_bytes(num_slots: int, vocab_size: int) -> int:
        """Return what it keeps on the device, but for what is small."""
        return 4 * num_slots * vocab_size

    def resolve(self, input_ids: Tensor) -> Tensor:
        """Put the last token of its slot in the place of each marker."""
        slots = (-1 - input_ids).clamp(min=0)
        return torch.where(input_ids < 0, self.last_token[slots], input_ids)

    def prepare(
        self, plan: StepPlan, new: Sequence[NewRequestData], slots: dict[str, int]
    ) -> SamplePlan:
        """Return the host's part of a step. `new` came with it, to `slots`; they need not sample
        yet.
        """
        sampling, edits = plan.sampling, plan.sampling.edits
        asked = (sampling.num_logprobs != NO_LOGPROBS).nonzero()[0]
        is_drawn = sampling.temperature > 0
        has_drawn = bool(np.count_nonzero(is_drawn))
        extras: dict[str, Words] = {}
        penalized = [data for data in new if data.sampling_params.has_penalties]
        if penalized:
            extras |= _seen_tokens(penalized, slots, self.vocab_size)
        has_any = any(edit.params.has_penalties for edit in edits.values())
        extras |= _recent_tokens(new, slots)
        if has_any:
            extras["penalties"] = _penalty_columns(
                plan.num_sampling, {place: edit.params for place, edit in edits.items()}
            )
        if edits:
            additions = [
                (place * self.vocab_size + token_id, value)
                for place, edit in edits.items()
                for token_id, value in edit.additions(int(sampling.num_tokens[place]))
            ]
            if additions:
                places, values = zip(*additions, strict=True)
                extras["added_to"] = np.array(places, dtype=np.int64).view(np.int32)
                extras["added"] = np.array(values, dtype=np.float32).view(np.int32)
            extras |= _bad_sequences(edits) | _allowed(edits)
        if 0 < len(asked) < plan.num_sampling:
            extras["asked"] = asked.astype(np.int32)
        return SamplePlan(
            num_rows=plan.num_sampling,
            is_greedy=not edits and not has_drawn,
            has_top_k=has_drawn and bool(np.count_nonzero(is_drawn & (sampling.top_k > 0))),
            has_top_p=has_drawn and bool(np.count_nonzero(is_drawn & (sampling.top_p < 1))),
            asked=asked.tolist(),
            num_logprobs=sampling.num_logprobs[asked].tolist(),
            has_penalties=has_any,
            extras=self.stage(extras) if extras else {},
        )

    def stage_masks(self, masks: Masks) -> DeviceMasks:
        """Bring the masks of a step to the device."""
        places, words = masks.places.astype(np.int32), masks.words
        staged = self.stage({"places": places, "words": words.reshape(-1)})
        return DeviceMasks(staged["places"], staged["words"].view(words.shape))

    def stage(self, extras: dict[str, Words]) -> dict[str, Tensor]:
        """Bring arrays to the device, by one copy; each begins where an int64 may."""
        sizes = {name: len(words) + len(words) % 2 for name, words in extras.items()}
        total = sum(sizes.values())
        if total > self._ring_size:
            self._ring_size = 2 * total
            self._ring = StagingRing(self._device, self._ring_size)
        buffer = self._ring.take()
        target = torch.empty(total, dtype=torch.int32, device=self._device.torch_device)
        staged, begin = {}, 0
        for name, words in extras.items():
            buffer.array[begin : begin + len(words)] = words
            staged[name] = target[begin : begin + len(words)]
            begin += sizes[name]
        self._device.stage(target, buffer)
        self._ring.guard()
        return staged

    # What follows runs when the device gets there.

    def sample(
        self,
        logits: Tensor,
        plan: SamplePlan,
        arrays: Sections[Tensor],
        masks: DeviceMasks | None = None,
    ) -> None:
        """Choose a token from each row of `logits` [S, V]; keep it, and write the result out."""
        num_rows, extras = plan.num_rows, plan.extras
        self._note_seen(extras)
        slots = arrays.token_slots[:num_rows].long()
        edited = logits if plan.is_greedy else self._edit(logits, plan, slots)
        if masks is not None:
            edited = masks.apply(edited)
        if plan.is_greedy:
            best, token_ids = edited.max(dim=-1)  # one pass over the logits for both
        else:
            best = edited.amax(dim=-1)
            columns = DrawColumns(
                temperature=arrays.temperature[:num_rows].view(torch.float32),
                top_k=arrays.top_k[:num_rows],
                top_p=arrays.top_p[:num_rows].view(torch.float32),
                min_p_floor=arrays.min_p_floor[:num_rows].view(torch.float32),
                keys=arrays.keys[: 2 * num_rows].view(2, num_rows),
                has_top_k=plan.has_top_k,
                has_top_p=plan.has_top_p,
            )
            token_ids = self._draw(edited, columns)
        is_sound = (
            best.abs() < torch.inf
        )  # NaN if there is any in a row; fewer kernels than isfinite
        # What else was chosen there need not be a token, and is looked up in tables.
        token_ids = torch.where(is_sound, token_ids, 0)
        if plan.asked:
            self._write_logprobs(logits, token_ids, plan)
        self.out[:num_rows] = torch.where(is_sound, token_ids, NO_TOKEN)
        # Last, what may not be done twice: a step that lacks memory before this is run again.
        said: Tensor | None = None
        if "bad_last" in extras:
            said = torch.cat([self._recent[slots][:, 1:], token_ids[:, None].int()], dim=1)
        if plan.has_penalties:
            one = torch.ones_like(token_ids, dtype=torch.int32)
            self._seen.index_put_((slots, token_ids), one, accumulate=True)
        if said is not None:
            self._recent.index_copy_(0, slots, said)
        self.last_token.index_copy_(0, slots, token_ids)

    def _note_seen(self, extras: dict[str, Tensor]) -> None:
        """The tokens of requests that are new and look back at them."""
        if "recent_slots" in extras:
            recent = extras["recent"].view(-1, _NUM_RECENT)
            self._recent.index_copy_(0, extras["recent_slots"].long(), recent)
        if "fresh_slots" in extras:
            self._seen.index_fill_(0, extras["fresh_slots"].long(), 0)
            flat = self._seen.view(-1)
            flat.index_fill_(0, extras["in_prompt"].view(torch.int64), _IN_PROMPT)
            if "in_output" in extras:
                places = extras["in_output"].view(torch.int64)
                flat.index_add_(0, places, torch.ones_like(places, dtype=torch.int32))

    def _edit(self, logits: Tensor, plan: SamplePlan, slots: Tensor) -> Tensor:
        """Apply penalties and biases to `logits` [S, V], as `LogitsEdits.apply` does on a CPU."""
        extras = plan.extras
        if not extras.keys() & _EDITS:
            return logits
        logits = logits.to(torch.float32, copy=True)
        if "penalties" in extras:
            columns = extras["penalties"].view(torch.float32).view(3, -1, 1)
            repetition, frequency, presence = columns
            seen = self._seen[slots]
            penalized = torch.where(logits < 0, logits * repetition, logits / repetition)
            logits = torch.where(seen > 0, penalized, logits)
            counts = (seen & (_IN_PROMPT - 1)).float()
            logits = logits - counts * frequency - (counts > 0).float() * presence
        if "added" in extras:
            places = extras["added_to"].view(torch.int64)
            logits.view(-1).index_add_(0, places, extras["added"].view(torch.float32))
        if "bad_last" in extras:
            places = extras["bad_places"].long()
            before = extras["bad_before"].view(-1, _NUM_RECENT)
            is_said = (before == _ANYTHING) | (before == self._recent[slots[places]])
            added = is_said.all(dim=1).float() * BAD
            logits.view(-1).index_add_(0, places * self.vocab_size + extras["bad_last"], added)
        if "allowed" in extras:
            words = extras["allowed"].view(len(extras["allowed_places"]), -1)
            logits = DeviceMasks(extras["allowed_places"], words).apply(logits)
        return logits

    def _write_logprobs(self, logits: Tensor, token_ids: Tensor, plan: SamplePlan) -> None:
        if "asked" in plan.extras:
            asked = plan.extras["asked"].long()
            logits, token_ids = logits[asked], token_ids[asked]
        width = min(max(plan.num_logprobs), self.vocab_size)
        write_logprobs(logits, token_ids, width, self.out[plan.num_rows :])


def write_logprobs(logits: Tensor, token_ids: Tensor, width: int, out: Tensor) -> None:
    """Write how likely `token_ids` [N] are by `logits` [N, V], with `width` alternatives, to where
    `out` begins: 2 + 2 * width words for each, for `read_logprobs`.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > own).sum(dim=1) + 1
    values, ids = logprobs.topk(width)
    begin = 0
    for part in (own.view(torch.int32), ranks, ids, values.contiguous().view(torch.int32)):
        end = begin + part.numel()
        out[begin:end] = part.reshape(-1)
        begin = end


def read_logprobs(words: Words, num_logprobs: Sequence[int], width: int) -> list[TokenLogprobs]:
    """Return what `write_logprobs` wrote of N tokens, which want `num_logprobs` alternatives
    each.
    """
    count = len(num_logprobs)
    bounds = np.cumsum([0, count, count, count * width, count * width])
    own, ranks, ids, values = (words[a:b] for a, b in itertools.pairwise(bounds))
    columns = zip(
        num_logprobs,
        own.view(np.float32).tolist(),
        ranks.tolist(),
        ids.reshape(count, width).tolist(),
        values.view(np.float32).reshape(count, width).tolist(),
        strict=True,
    )
    return [
        TokenLogprobs(logprob, rank, top_ids[:n], top_values[:n])
        for n, logprob, rank, top_ids, top_values in columns
    ]


def read_result(
    words: Words, plan: SamplePlan, vocab_size: int
) -> tuple[list[int], dict[int, TokenLogprobs], dict[int, str]]:
    """Return the tokens of the S rows, logprobs by row, and which rows have no token that means
    anything, and why, from what `sample` wrote out.
    """
    token_ids = words[: plan.num_rows].tolist()
    failed: dict[int, str] = {}
    if NO_TOKEN in token_ids:
        failed = {row: NOT_FINITE for row, own in enumerate(token_ids) if own == NO_TOKEN}
        token_ids = [max(own, 0) for own in token_ids]
    if not plan.asked:
        return token_ids, {}, failed
    width = min(max(plan.num_logprobs), vocab_size)
    found = read_logprobs(words[plan.num_rows :], plan.num_logprobs, width)
    logprobs = dict(zip(plan.asked, found, strict=True))
    return token_ids, {row: own for row, own in logprobs.items() if row not in failed}, failed


def _seen_tokens(
    new: Sequence[NewRequestData], slots: dict[str, int], vocab_size: int
) -> dict[str, Words]:
    rows = [slots[data.request_id] for data in new]
    extras = {"fresh_slots": np.array(rows, dtype=np.int32)}
    for name, has_prompt in (("in_prompt", True), ("in_output", False)):
        places = [
            row * vocab_size + token_id
            for row, data in zip(rows, new, strict=True)
            for token_id in _part(data, has_prompt)
        ]
        if places:
            extras[name] = np.array(places, dtype=np.int64).view(np.int32)
    return extras


def _recent_tokens(new: Sequence[NewRequestData], slots: dict[str, int]) -> dict[str, Words]:
    """Return what requests that are new, and have bad words of several tokens, have said last."""
    fresh = [data for data in new if any(len(i) > 1 for i in data.sampling_params.bad_words_ids)]
    if not fresh:
        return {}
    recent = np.full((len(fresh), _NUM_RECENT), _NOTHING, dtype=np.int32)
    for place, data in enumerate(fresh):
        if said := _part(data, False)[-_NUM_RECENT:]:
            recent[place, -len(said) :] = said
    rows = [slots[data.request_id] for data in fresh]
    return {"recent_slots": np.array(rows, dtype=np.int32), "recent": recent.reshape(-1)}


def _bad_sequences(edits: dict[int, LogitsEdits]) -> dict[str, Words]:
    """Bad words of several tokens: what was just said is known on the device alone."""
    bad = [(place, ids) for place, edit in edits.items() for ids in edit.bad_sequences]
    if not bad:
        return {}
    before = np.full((len(bad), _NUM_RECENT), _ANYTHING, dtype=np.int32)
    for row, (_, token_ids) in enumerate(bad):
        before[row, 1 - len(token_ids) :] = token_ids[:-1]
    return {
        "bad_places": np.array([place for place, _ in bad], dtype=np.int32),
        "bad_before": before.reshape(-1),
        "bad_last": np.array([token_ids[-1] for _, token_ids in bad], dtype=np.int32),
    }


def _allowed(edits: dict[int, LogitsEdits]) -> dict[str, Words]:
    words = {place: edit.allowed_words for place, edit in edits.items()}
    asked = {place: own for place, own in words.items() if own is not None}
    if not asked:
        return {}
    places = np.array(list(asked), dtype=np.int32)
    return {"allowed_places": places, "allowed": np.concatenate(list(asked.values()))}


def _part(data: NewRequestData, is_prompt: bool) -> list[int]:
    end = data.num_prompt_tokens
    return data.token_ids[:end] if is_prompt else data.token_ids[end:]


def _penalty_columns(num_rows: int, params: dict[int, SamplingParams]) -> Words:
    columns = np.zeros((3, num_rows), dtype=np.float32)
    columns[0] = 1
    for place, p in params.items():
        columns[:, place] = p.repetition_penalty, p.frequency_penalty, p.presence_penalty
    return columns.reshape(-1).view(np.int32)


# How likely the tokens of prompts are, and sums of their hidden states, on a device: staged with a
# step, read after it. Knows a model and numbers; knows nothing about requests.


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """The questions to one step about prompts, at N of its T tokens."""

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
        """Return logprobs of complete prompts, from a copy of `found`; to be called in order of
        steps.
        """
        found: list[TokenLogprobs] = []
        for piece in self.pieces:
            own = words[self._begin(piece.start) : self._begin(piece.stop)]
            found += read_logprobs(own, self.wanted.num_logprobs[piece], self.width)
        return self.wanted.keep(found)

    def _begin(self, number: int) -> int:
        return number * (2 + 2 * self.width)


@dataclass(frozen=True, slots=True)
class PooledPlan:
    """The sums of hidden states that one step adds to vectors of P prompts, at N of its T
    tokens.
    """

    wanted: WantedStates
    rows: Tensor  # N of the T, int32 on the device
    found: Tensor  # int32 on the device, the bits of float32 [P, hidden]: the answer

    def look(self, states: Tensor) -> None:
        """Fill `found` from the hidden states [T, hidden]; on the device."""
        totals = self.wanted.totals(states[self.rows.long()])
        self.found.copy_(totals.flatten().view(torch.int32))

    def read(self, words: Words, failed: dict[str, str]) -> dict[str, Vector]:
        """Return vectors of complete prompts, from a copy of `found`; to be called in order of
        steps.
        """
        totals = torch.from_numpy(words.view(np.float32).copy())
        return self.wanted.keep(totals.view(self.wanted.num_prompts, -1), failed)


def plan_pooled(
    wanted: WantedStates | None, plan: StepPlan, sampler: DeviceSampler, hidden_size: int
) -> PooledPlan | None:
    """Stage where the states are that are wanted of the step of `plan`; None if none are."""
    if wanted is None:
        return None
    rows = sampler.stage({"rows": _planned(wanted.places, plan)})["rows"]
    return PooledPlan(wanted, rows, rows.new_empty(wanted.num_prompts * hidden_size))


def _planned(places: IntArray, plan: StepPlan) -> Words:
    """Return which of the T tokens of a plan these packed ones are."""
    place_of = np.empty(len(plan.tokens), dtype=np.int32)
    place_of[plan.tokens] = np.arange(len(plan.tokens))
    return place_of[places]


def plan_prompts(
    wanted: WantedLogprobs | None, plan: StepPlan, sampler: DeviceSampler
) -> PromptPlan | None:
    """Stage what is wanted of the step of `plan`; None if nothing is."""
    if wanted is None:
        return None
    places = _planned(wanted.places, plan)
    staged = sampler.stage({"rows": places, "token_ids": wanted.token_ids.astype(np.int32)})
    width = min(max(wanted.num_logprobs, default=0), sampler.vocab_size)
    found = staged["rows"].new_empty(max(1, len(wanted.places) * (2 + 2 * width)))
    return PromptPlan(
        wanted, places, staged["rows"], staged["token_ids"], width, sampler.vocab_size, found
    )
