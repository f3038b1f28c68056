"""One run of the matrix: an engine with some features, random traffic, and what is right of it."""

import asyncio
import random
from collections.abc import Collection, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aioserve import AsyncEngine, MultimodalPrompt, PoolingParams, SamplingParams
from aioserve.engine import EngineClient
from aioserve.features.formats import Call, Function
from aioserve.features.formats.json_formats import HermesParser
from aioserve.features.spec_decode.draft_length import DraftLength
from aioserve.features.spec_decode.model_drafter import ModelDraftLength
from aioserve.lab.decision_log.reader import DecisionLog
from aioserve.lab.decision_log.replay import replay
from tests.kit import stats_of
from tests.matrix.asks import STOPS, Ask
from tests.matrix.built import Builds
from tests.matrix.features import MODELS, ROUNDED, in_order
from tests.matrix.places import loading_one_at_a_time, serving
from tests.matrix.policy import MatrixPolicy
from tests.matrix.reference import ROUNDING, Reference
from tests.matrix.settings import (
    POLICY,
    asks_of,
    make_config,
    make_params,
    policy_options,
)
from tests.processes import COMPUTING_SECONDS
from tests.seeing_models import picture
from tests.workers.joined import read

NUM_ABORTED = 3
MORE_ROUNDS = 8  # of requests, for what has not come about by chance


class WrongError(AssertionError):
    """A run that was served, and not as it should be."""


@dataclass
class Matrix:
    """Runs, whose models and references are kept."""

    builds: Builds
    _references: dict[Path, Reference] = field(default_factory=dict)
    _alone: dict[Any, Any] = field(default_factory=dict)

    async def run(self, features: Collection[str], place: str, seed: int = 0) -> None:
        """Raises `ConfigError` or `RequestError` where the features are refused, `WrongError` for a
        wrong reply, or for a feature that did not come about.
        """
        rng = random.Random(f"{in_order(features)} {place} {seed}")
        reference = self.reference(features)
        asks = asks_of(features, len(reference.prompts))
        config = make_config(features, self.builds, place)
        before = MatrixPolicy.num_pauses, MatrixPolicy.num_pins
        async with (
            asyncio.timeout(COMPUTING_SECONDS),
            serving(config, place, seed) as (engine, front),
        ):
            run = _Run(features, engine, front, reference, self.builds, rng)
            found = await run.drive(asks)
            if {"prefix cache", "n-gram drafts", "policy switch"} & set(features):
                once = list({ask.kinds: ask for ask in asks}.values())
                found += await run.drive(once, is_operated=False)
            if "prefix cache" in features:  # which others have not evicted meanwhile
                plain = Ask(len(reference.prompts) - 1)
                found += [(plain, await run.ask(plain)) for _ in range(2)]
            await run.settle()
            for _ in range(MORE_ROUNDS):  # what depends on timing
                if not _missing(features, run, before):
                    break
                found += await run.drive(asks, is_operated=False)
                await run.settle()
            if missing := _missing(features, run, before):
                raise WrongError(f"it did not come about: {', '.join(missing)}")
        for ask, reply in found:
            await self._check(features, ask, reply, place)
        if "decision log" in features:
            _check_log(config.scheduler.decision_log)

    def reference(self, features: Collection[str]) -> Reference:
        """The reference of the model that has these features."""
        model = self.builds.model(features)
        if model.path not in self._references:
            self._references[model.path] = Reference(model, _prompts(model.seeing))
        return self._references[model.path]

    async def _check(self, features: Collection[str], ask: Ask, reply: Any, place: str) -> None:
        rounded = frozenset(ROUNDED) & set(features)
        for sample in () if isinstance(reply, np.ndarray) else reply:
            if "logprobs" in ask.kinds and len(sample.logprobs) != len(sample.token_ids):
                raise WrongError(
                    f"{ask}: logprobs of {len(sample.logprobs)} tokens, which are "
                    f"{len(sample.token_ids)}"
                )
        if "tools" in ask.kinds:
            for sample in reply:
                _check_call(sample.text)
        if not rounded:
            reference = self.reference(features)
            is_vector = "embeddings" in ask.kinds
            wrong = reference.wrong_vector if is_vector else reference.wrong
            if (what := wrong(ask, reply)) is not None:
                raise WrongError(what)
        if not rounded and "seeded sampling" not in ask.kinds:
            return
        expected = await self._reply_alone(features, rounded, ask, place)
        if isinstance(reply, np.ndarray):
            if np.abs(reply - expected).max() > ROUNDING:
                raise WrongError(f"{ask}: its vector is not that of the request alone")
            return
        for sample, other in zip(reply, expected, strict=True):
            if sample.token_ids != other.token_ids:
                raise WrongError(f"{ask}: {sample.token_ids}, and alone {other.token_ids}")

    async def _reply_alone(
        self, features: Collection[str], rounded: frozenset[str], ask: Ask, place: str
    ) -> Any:
        """The reply to a request that is alone in an engine without anything else."""
        own = rounded | ({*MODELS, "adapters"} & set(features))
        where, model = "one process" if place == "workers" else place, self.builds.model(features)
        known = self._alone.setdefault((model.path, own, where), {})
        if ask not in known:
            reference = self.reference(features)
            config = make_config(own, self.builds, where, model)
            async with serving(config, where, 0) as (_, front):
                for other in {ask, *asks_of(features, len(reference.prompts))}:
                    prompt = _as_prompt(reference.prompts[other.place])
                    known[other] = await _reply(front, prompt, other)
        return known[ask]


class _Run:
    """One engine under traffic."""

    def __init__(
        self,
        features: Collection[str],
        engine: AsyncEngine,
        front: EngineClient,
        reference: Reference,
        builds: Builds,
        rng: random.Random,
    ) -> None:
        self._features, self.engine, self._front = features, engine, front
        self._reference, self._builds, self._rng = reference, builds, rng
        self.num_cached = self.num_stopped = 0
        self.most_used: dict[str, float] = {}

    async def drive(
        self, asks: Sequence[Ask], *, is_operated: bool = True
    ) -> list[tuple[Ask, Any]]:
        """Replies to requests that arrive at random, beside others that leave at random."""
        longest = 0.0 if "preemption" in self._features else 0.02
        delays = [self._rng.random() * longest for _ in asks]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.ask(*one)) for one in zip(asks, delays, strict=True)]
            for number in range(NUM_ABORTED):
                group.create_task(self._leave(asks[number % len(asks)]))
            if is_operated:
                group.create_task(self._operate())
        return [(ask, task.result()) for ask, task in zip(asks, tasks, strict=True)]

    async def ask(self, ask: Ask, delay: float = 0.0) -> Any:
        """The reply to a request that arrives after `delay` seconds."""
        await asyncio.sleep(delay)
        prompt = _as_prompt(self._reference.prompts[ask.place])
        found = await _reply(self._front, prompt, ask)
        if not isinstance(found, np.ndarray):
            self.num_cached += found[0].num_cached_tokens
            self.num_stopped += found[0].stop_reason in STOPS
        return found

    async def _leave(self, ask: Ask) -> None:
        """A request whose client leaves before its end."""
        await asyncio.sleep(self._rng.random() * 0.02)
        enough, found = self._rng.randrange(1, 6), 0
        prompt = _as_prompt(self._reference.prompts[ask.place])
        params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
        async with aclosing(self._front.generate(prompt, params, **_fields(ask))) as outputs:
            async for output in outputs:
                found += len(output.token_ids)
                if found >= enough:
                    return

    async def _operate(self) -> None:
        """What an operator does meanwhile, twice."""
        engine = self.engine
        for _ in range(2):
            await asyncio.sleep(self._rng.random() * 0.02)
            if "policy switch" in self._features:
                engine.switch_policy("fcfs")
            if "sleep" in self._features:
                await engine.sleep(weights=True)
                await engine.wake()
            if "reload" in self._features:
                await engine.reload(str(self._builds.model(self._features).copy))
            if "policy switch" in self._features:
                await asyncio.sleep(self._rng.random() * 0.01)
                engine.switch_policy(POLICY, policy_options(self._features))

    async def settle(self) -> None:
        """Until no request and no lease holds anything."""
        while (stats := stats_of(self.engine)) and (  # noqa: ASYNC110
            stats.num_used_kv_blocks or stats.num_running_reqs or stats.num_waiting_reqs
        ):
            await asyncio.sleep(0.002)


def _missing(features: Collection[str], run: _Run, before: tuple[int, int]) -> list[str]:
    """The features that have not come about."""
    stats = stats_of(run.engine)
    metrics = run.engine.internals.render_metrics([]).decode()
    came = {
        "prefix cache": run.num_cached > 0,
        "preemption": stats.num_preemptions > 0,
        "stop strings": run.num_stopped > 0,
        "pauses": MatrixPolicy.num_pauses > before[0],
        "leases": MatrixPolicy.num_pins > before[1],
        "n-gram drafts": stats.num_draft_tokens > 0,
        "draft model": stats.num_draft_tokens > 0,
        "EAGLE": stats.num_draft_tokens > 0,
        "MTP": stats.num_draft_tokens > 0,
        "images": stats.num_encoder_inputs > 0,
        "states": stats.num_state_slots > 0,
        "windows": stats.num_window_blocks > 0,
        "connector, memory": "aioserve_kv_connector_saved_tokens_total" in metrics,
        "connector, directory": "aioserve_kv_connector_saved_tokens_total" in metrics,
    }
    return [name for name in features if not came.get(name, True)]


def _check_log(path: str | None) -> None:
    assert path is not None
    result = replay(DecisionLog(Path(path)))
    if result.divergence is not None:
        raise WrongError(f"the decision log is not replayed: {result.divergence}")


def _check_call(text: str) -> None:
    parser = HermesParser([Function("go", {"type": "object"})])
    events = [*parser.append(text), *parser.flush()]
    calls = [event for event in events if isinstance(event, Call)]
    if [call.name for call in calls] != ["go"]:
        raise WrongError(f"no tool call: {text!r}")


def _fields(ask: Ask) -> Any:
    return {"adapter": "wide"} if ask.is_adapted else {}


async def _reply(front: EngineClient, prompt: Any, ask: Ask) -> Any:
    params = make_params(ask)
    if isinstance(params, PoolingParams):
        return (await front.embed(prompt, params, **_fields(ask))).embedding
    return await read(front, prompt, params, **_fields(ask))


def _as_prompt(prompt: Any) -> Any:
    return prompt if isinstance(prompt, list) else MultimodalPrompt(*prompt)


def _prompts(seeing: Any) -> list[Any]:
    """Five of 9 to 70 tokens; the last two have 40 in common, the second repeats itself."""
    rng = random.Random(3)
    if seeing is None:
        some = [[rng.randrange(3, 500) for _ in range(n)] for n in (9, 17, 46)]
        shared = [rng.randrange(3, 500) for _ in range(40)]
        some[1] = some[1] * 3
        return some + [shared + [rng.randrange(3, 500) for _ in range(n)] for n in (6, 13)]
    mark, sizes = seeing.mark, [(70, 40), (30, 30), (25, 90)]
    a, b, c = (picture(i, *size) for i, size in enumerate(sizes))
    again = "to be or not to be, to be or not to be, that is"
    return [
        (f"{mark} What is this?", [a]),
        (f"Say: {mark} and {mark}, what?", [b, c]),
        (again, []),
        (f"The same again {mark}", [a]),
        (f"Who's there? {mark} {again}", [c]),
    ]


@contextmanager
def without_chance() -> Iterator[None]:
    """Inside the block every draft pays, however busy the machine is, and ranks that are threads
    read one after the other.
    """

    def stepped(self: DraftLength, num_rows: int, num_tokens: int, seconds: float) -> None:
        self.price = 1e-6

    with pytest.MonkeyPatch.context() as patch, loading_one_at_a_time():
        patch.setattr(DraftLength, "stepped", stepped)
        patch.setattr(ModelDraftLength, "stepped", stepped)
        yield
