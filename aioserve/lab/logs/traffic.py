"""What a decision log says that is not the policy's doing: requests, step times, memory.

As lives of requests for `what_if`; as a workload and settings for `compare`. Runs nothing.
"""

from array import array
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from aioserve.decision_log.chronicle import Chronicle, Life
from aioserve.decision_log.reader import DecisionLog
from aioserve.decision_log.records import Header, Reset
from aioserve.errors import ConfigError
from aioserve.lab.calibration.fit import fit_step_time
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest, text_name
from aioserve.runner.profile import StepTimeModel
from aioserve.scheduler.output import StepFeatures

BLOCK = 16  # tokens: what prompts share is found in multiples of this


class Traffic(NamedTuple):
    """The requests of a log, and the machine that served them."""

    header: Header
    chronicle: Chronicle  # fed with the whole log
    resets: list[float]  # of the prefix cache, seconds since the log began
    step_time: StepTimeModel

    @property
    def lives(self) -> list[Life]:
        """The lives of all requests that were accepted while the log was written, with their
        prompts.
        """
        return self.chronicle.lives[self.header.num_there :]


def read_traffic(log: DecisionLog) -> Traffic:
    """Requests, and the step-time model that fits the steps. Raises `ConfigError`."""
    chronicle = Chronicle(log.header, keep_prompts=True)
    features: list[StepFeatures] = []
    seconds: list[float] = []
    resets = []
    for record in log:
        step = chronicle.feed(record)
        if step is not None:
            features.append(step.features)
            seconds.append(step.seconds)
        if isinstance(record, Reset):
            resets.append(chronicle.now)
    source = f"fitted to the {len(features)} steps of decision log {log.path.name}"
    return Traffic(log.header, chronicle, resets, fit_step_time(features, seconds, source))


def make_workload(traffic: Traffic, path: str, seed: int = 0) -> Workload:
    """The requests of a log: when they came, what their prompts share, how long the replies were.

    Raises `ConfigError` if it has none, or if they have images.
    """
    if any(life.spec.encoder_inputs for life in traffic.lives):
        raise ConfigError(
            f"decision log {path} has requests with images, whose time in a step it does not tell: "
            "`replay` decides on it anew"
        )
    chains = [_chain(life) for life in traffic.lives]
    num_holders = Counter(name for chain in chains for name in chain)
    lives = sorted(zip(traffic.lives, chains, strict=True), key=lambda pair: pair[0].arrival)
    if not lives:
        raise ConfigError(f"decision log {path} has no requests that were served")
    first = lives[0][0].arrival
    return Workload(
        Path(path).name,
        tuple(
            WorkloadRequest(
                life.arrival - first,
                _pieces(life, chain, num_holders, seed),
                max(len(life.tokens), 1),
                priority=life.spec.priority,
                user=life.spec.user,
                timeout=_timeout(life),
                draft_acceptance=_draft_acceptance(life),
                max_tokens=life.spec.sampling_params.max_tokens,
                hints=life.spec.hints,
            )
            for life, chain in lives
        ),
        seed=seed,
        is_trace=True,
    )


def make_settings(traffic: Traffic) -> list[tuple[str, Any]]:
    """Step times as fitted to the log, the memory of the server that wrote it, and its drafts."""
    header, step_time = traffic.header, traffic.step_time
    longest_draft = traffic.chronicle.longest_draft
    return [
        *([("runner.simulated_draft_tokens", longest_draft)] if longest_draft else []),
        ("model.max_model_len", header.max_model_len),
        ("cache.num_kv_blocks", header.num_kv_blocks),
        ("cache.block_size", header.block_size),
        ("cache.enable_prefix_caching", header.enable_prefix_caching),
        ("cache.watermark", (header.num_watermark_blocks + 0.5) / header.num_kv_blocks),
        ("cache.num_state_slots", header.num_state_slots),
        *_window_settings(header),
        ("runner.step_base_ms", step_time.base_ms),
        ("runner.step_prefill_token_us", step_time.prefill_token_us),
        ("runner.step_decode_us", step_time.decode_us),
        ("runner.step_context_token_us", step_time.context_token_us),
        ("runner.step_query_context_ns", step_time.query_context_ns),
        ("runner.step_prefill_us", step_time.prefill_us),
        ("runner.step_idle_ms", step_time.idle_ms),
    ]


def make_limits(traffic: Traffic) -> list[tuple[str, Any]]:
    """The scheduler's settings of the server that wrote the log, besides its policy and what it
    noted: seats, budgets, limits of the queue, victims.
    """
    return [
        (f"scheduler.{name}", value)
        for name, value in traffic.header.scheduler.items()
        if name not in ("policy", "options", "decision_log", "request_log")
    ]


def _window_settings(header: Header) -> list[tuple[str, Any]]:
    if (windows := header.windows) is None:
        return []
    return [
        ("runner.simulated_window", windows.num_tokens),
        ("cache.num_window_blocks", windows.num_blocks),
    ]


def _chain(life: Life) -> list[int]:
    """A name for every beginning of the prompt that is whole blocks long."""
    assert life.prompt is not None
    blocks = [life.prompt[i : i + BLOCK] for i in range(0, len(life.prompt) - BLOCK + 1, BLOCK)]
    root = text_name("logged", life.spec.cache_salt, life.spec.adapter_id)
    return list(accumulate(blocks, _extend, initial=root))[1:]


def _extend(name: int, block: "array[int]") -> int:
    return text_name(name, block.tobytes().hex())


def _pieces(
    life: Life, chain: list[int], num_holders: Counter[int], seed: int
) -> tuple[Piece, ...]:
    """The prompt cut where others leave it: what shares a block of a piece shares all of it."""
    pieces, begin = [], 0
    for end in range(1, len(chain) + 1):
        if end == len(chain) or num_holders[chain[end]] != num_holders[chain[end - 1]]:
            name = text_name("piece", seed, chain[end - 1])
            pieces.append(Piece(name, (end - begin) * BLOCK))
            begin = end
    if rest := life.num_prompt_tokens - len(chain) * BLOCK:
        pieces.append(Piece(text_name("rest", seed, str(life.arrival), life.request_id), rest))
    return tuple(pieces)


def _draft_acceptance(life: Life) -> float | None:
    """The share of right guesses among those whose predecessors were right."""
    tried = life.num_tried_drafts
    return life.num_right_drafts / tried if tried else None


def _timeout(life: Life) -> float | None:
    deadline = life.spec.deadline
    return None if deadline is None else max(deadline - life.spec.arrival_time, 1e-3)
