"""The commands of operators: they stop an engine, change its policy, weights, adapters or log."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import field

from aioserve.config import LogLevel
from aioserve.engine.operations.command import (
    Arrivals,
    Done,
    EngineCommand,
    FilePath,
    Http,
    OperatorCommand,
    Report,
    Running,
    State,
    Text,
    Told,
    commands_of,
)
from aioserve.errors import (
    AioserveError,
    EngineDeadError,
    EngineOverloadedError,
    NoAdapterError,
    RequestError,
    UnknownAdapterError,
    UnknownModelError,
)
from aioserve.support.logs import set_log_level

if TYPE_CHECKING:
    from aioserve.engine import AsyncEngine


class LoadAdapter(OperatorCommand[None, str], frozen=True):
    """Loads the adapter in the directory `"lora_path"` and serves it under the name `"lora_name"`.
    Other requests run on meanwhile. See [adapters](adapters.md).
    """

    name: Text = field(name="lora_name")
    path: FilePath = field(name="lora_path")

    http = Http(
        "/v1/load_lora_adapter",
        "Serve an adapter from now on, as vLLM has it.",
        raises=(EngineDeadError, UnknownAdapterError),
        schema="LoadRequest",
    )

    async def run_on(self, engine: "AsyncEngine") -> None:
        await engine.adapters.load(self.name, self.path)

    def tell(self, answer: None) -> str:
        return f"Success: LoRA adapter {self.name!r} added successfully."

    def refusal(self, error: AioserveError) -> RequestError:
        if isinstance(error, NoAdapterError):
            return UnknownAdapterError(str(error), param="lora_path")
        return super().refusal(error)


class UnloadAdapter(OperatorCommand[None, str], frozen=True):
    """Stops serving the adapter `"lora_name"`; running requests that use it finish."""

    name: Text = field(name="lora_name")

    http = Http(
        "/v1/unload_lora_adapter",
        "Stop serving an adapter: running requests that use it finish.",
        raises=(EngineDeadError, UnknownModelError),
        schema="UnloadRequest",
    )

    async def run_on(self, engine: "AsyncEngine") -> None:
        engine.adapters.unload(self.name)

    def tell(self, answer: None) -> str:
        return f"Success: LoRA adapter {self.name!r} removed successfully."


class EngineState(msgspec.Struct, frozen=True):
    """Whether the engine computes, is paused or sleeps."""

    state: State


class Pause(OperatorCommand[EngineState, EngineState], frozen=True):
    """Computes no step until `/admin/resume`. `"running"`: `"keep"` (the default) keeps requests,
    which go on after the pause; `"abort"` ends them with the tokens that they have. `"arrivals"`:
    new requests `"wait"` (the default) in the queue, within its limits, or are refused
    (`"refuse"`) with 503, code `engine_paused` and `Retry-After`.
    """

    running: Running = "keep"
    arrivals: Arrivals = "wait"

    http = Http("/admin/pause", "Compute no further step; requests wait, or are ended.")

    async def run_on(self, engine: "AsyncEngine") -> EngineState:
        await engine.pause(running=self.running, arrivals=self.arrivals)
        return EngineState(engine.state)


class Resume(OperatorCommand[EngineState, EngineState], frozen=True):
    """Ends a pause: steps are computed again."""

    http = Http("/admin/resume", "Go on after a pause.", raises=(EngineDeadError, RequestError))

    async def run_on(self, engine: "AsyncEngine") -> EngineState:
        await engine.resume()
        return EngineState(engine.state)


class Sleep(OperatorCommand[EngineState, EngineState], frozen=True):
    """Pauses as `/admin/pause` does, and frees the memory of the KV cache; with `"weights": true`
    also that of the model. After `/admin/wake`, kept requests are computed again.
    """

    weights: bool = False
    running: Running = "keep"
    arrivals: Arrivals = "wait"

    http = Http(
        "/admin/sleep",
        "Pause, and give back the memory of the KV cache, or of the weights as well.",
    )

    async def run_on(self, engine: "AsyncEngine") -> EngineState:
        await engine.sleep(weights=self.weights, running=self.running, arrivals=self.arrivals)
        return EngineState(engine.state)


class Wake(OperatorCommand[EngineState, EngineState], frozen=True):
    """Allocates the memory again, loads the weights if they were freed, and goes on."""

    http = Http(
        "/admin/wake",
        "Allocate the freed memory again, and go on.",
        raises=(EngineDeadError, RequestError),
    )

    async def run_on(self, engine: "AsyncEngine") -> EngineState:
        await engine.wake()
        return EngineState(engine.state)


class Reload(OperatorCommand[EngineState, EngineState], frozen=True):
    """Loads the weights of the model directory `"path"`, which must hold the same model with other
    weights, and drops cached prefixes. Kept requests go on after the tokens that they have. On
    a CPU, memory for both sets of weights is needed; a CUDA device frees the old weights first. On
    any error the old weights serve on. A sleeping engine wakes up; a paused one stays paused.
    """

    path: FilePath
    running: Running = "keep"

    http = Http("/admin/reload", "Serve other weights of the same model.", param="path")

    async def run_on(self, engine: "AsyncEngine") -> EngineState:
        await engine.reload(self.path, running=self.running)
        return EngineState(engine.state)


class PolicyName(msgspec.Struct):
    """The scheduling policy of an engine and its options."""

    policy: str
    options: dict[str, Any]


class PolicyChange(PolicyName):
    """Response of /admin/policy: what there is, and what there was."""

    before: PolicyName


class SwitchPolicy(OperatorCommand[PolicyName, PolicyChange], frozen=True):
    """Switches to the scheduler policy `"policy"` with its `"options"` from the next step on; an
    invalid one changes nothing. See [live policies](live-policies.md).
    """

    policy: str
    options: dict[str, Any] | None = None

    http = Http(
        "/admin/policy",
        "Change the policy from the next step on.",
        param="policy",
        schema="PolicyRequest",
    )

    async def run_on(self, engine: "AsyncEngine") -> PolicyName:
        """Switch the policy, and return the policy and options that there were before."""
        before = engine.config.scheduler
        engine.switch_policy(self.policy, self.options)
        return PolicyName(before.policy, before.options)

    def tell(self, answer: PolicyName) -> PolicyChange:
        return PolicyChange(self.policy, self.options or {}, answer)


class Trial(msgspec.Struct):
    """Response of /admin/try_policy: where the report is, and its table."""

    report: str  # where it can be read, relative to the server's root
    requests: int  # that came while it was recorded, and were given to both policies
    missing: int  # requests more, and every difference would have an interval
    on_these_requests: list[str]  # what the other policy changes for them, in sentences
    has_intervals: bool  # whether differences have intervals, which are about other requests
    table: str  # the comparison in words


class TryPolicy(OperatorCommand[Report, Trial], frozen=True):
    """Records requests for `"seconds"`, or until `"requests"` have arrived, and compares the policy
    `"policy"` with its `"options"` to the current one on these requests. See
    [live policies](live-policies.md).
    """

    policy: str
    options: dict[str, Any] | None = None
    seconds: float | None = None  # to record; None: until `requests` came, 300 at most
    # After which the recording ends; None: 200 without `seconds`.
    num_requests: int | None = msgspec.field(default=None, name="requests")

    http = Http(
        "/admin/try_policy",
        "Record requests, and compare another policy on them.",
        param="policy",
        raises=(EngineDeadError, EngineOverloadedError),
        schema="TrialRequest",
    )

    async def run_on(self, engine: "AsyncEngine") -> Report:
        settings = msgspec.structs.replace(
            engine.config.scheduler, policy=self.policy, options=self.options or {}
        )
        return await engine.internals.trials.try_policy(settings, self.seconds, self.num_requests)

    def tell(self, answer: Report) -> Trial:
        path = f"watch/reports/{answer.report_id}"
        return Trial(
            path,
            answer.num_requests,
            answer.num_missing,
            answer.on_these_requests,
            answer.has_intervals,
            answer.words,
        )


class FindReport(EngineCommand[bytes | None], frozen=True):
    """Ask for the page of a trial's report; the answer is None if there is none of that id."""

    report_id: str

    async def run_on(self, engine: "AsyncEngine") -> bytes | None:
        return engine.internals.trials.find(self.report_id)


class SwitchShadow(OperatorCommand[None, Done], frozen=True):
    """Evaluates the policy `"policy"` with its `"options"` on the traffic from now on, as a shadow;
    `"policy": null` ends that. An invalid one changes nothing. See
    [live policies](live-policies.md).
    """

    policy: str | None
    options: dict[str, Any] | None = None

    http = Http(
        "/admin/shadow",
        "Evaluate another policy on the traffic, or none.",
        param="policy",
        schema="ShadowRequest",
    )

    async def run_on(self, engine: "AsyncEngine") -> None:
        engine.switch_shadow(self.policy, self.options)

    def tell(self, answer: None) -> Done:
        return Done()


class SetLogLevel(OperatorCommand[None, Done], frozen=True):
    """Makes all processes of the server log lines of this `"level"` or above."""

    level: LogLevel

    http = Http("/admin/log_level", "Log more, or less.", schema="LogLevelRequest")

    async def run_on(self, engine: "AsyncEngine") -> None:
        """Set the level in the engine's process; a server with API workers sets theirs as well."""
        set_log_level(self.level)

    def tell(self, answer: None) -> Done:
        return Done()


class CacheReset(msgspec.Struct):
    """Response of /admin/reset_prefix_cache: whether the KV cache is empty now."""

    empty: bool


class ResetPrefixCache(OperatorCommand[bool, CacheReset], frozen=True):
    """Drops all cached prefixes; running requests go on. `"empty"` in the response says whether the
    KV cache is now empty.
    """

    http = Http("/admin/reset_prefix_cache", "Forget cached prefixes.")

    async def run_on(self, engine: "AsyncEngine") -> bool:
        return engine.reset_prefix_cache()

    def tell(self, answer: bool) -> CacheReset:
        return CacheReset(answer)


class OperatorMethods(ABC):
    """The operators' commands as typed methods in Python, of what has `ask`: those of `AsyncEngine`
    that have these names do the same.
    """

    @abstractmethod
    async def ask(self, command: OperatorCommand[Any, Told]) -> Told:
        """Give the command, and return what HTTP answers with."""

    async def pause(self, *, running: Running = "keep", arrivals: Arrivals = "wait") -> None:
        """Return when no step is computed, and none will be until `resume`.

        `running`: what becomes of requests that run or wait. `arrivals`: whether those that come
        meanwhile wait, or get `EnginePausedError`.
        """
        await self.ask(Pause(running, arrivals))

    async def resume(self) -> None:
        """Go on. Raises `RequestError` for an engine that sleeps."""
        await self.ask(Resume())

    async def sleep(
        self, *, weights: bool = False, running: Running = "keep", arrivals: Arrivals = "wait"
    ) -> None:
        """Pause, and give back the memory of the KV cache, with `weights` that of the model too."""
        await self.ask(Sleep(weights, running, arrivals))

    async def wake(self) -> None:
        """Take back what `sleep` gave, and go on."""
        await self.ask(Wake())

    async def reload(self, path: str, *, running: Running = "keep") -> None:
        """Serve the weights of a model directory of the server's machine."""
        await self.ask(Reload(path, running))

    async def switch_policy(
        self, policy: str, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Switch to another scheduler policy from the next step on. Returns the name and the
        options of the one before. Raises `RequestError`, also for a server without admin routes.
        """
        before = (await self.ask(SwitchPolicy(policy, dict(options or {})))).before
        return before.policy, before.options

    async def try_policy(
        self,
        policy: str,
        options: Mapping[str, Any] | None = None,
        *,
        seconds: float | None = None,
        num_requests: int | None = None,
    ) -> Trial:
        """Record requests for `seconds`, or until there are `num_requests`, and compare another
        policy with the one that plans, on them.
        """
        return await self.ask(TryPolicy(policy, dict(options or {}), seconds, num_requests))

    async def switch_shadow(
        self, policy: str | None, options: Mapping[str, Any] | None = None
    ) -> None:
        """Have another policy evaluated on the traffic from now on, or none."""
        await self.ask(SwitchShadow(policy, dict(options or {})))

    async def load_adapter(self, name: str, path: str) -> None:
        """Serve an adapter, a directory of the server's machine, under that name."""
        await self.ask(LoadAdapter(name, path))

    async def unload_adapter(self, name: str) -> None:
        """Serve the adapter no more; requests that have it finish."""
        await self.ask(UnloadAdapter(name))

    async def set_log_level(self, level: LogLevel) -> None:
        """Log more, or less, in all processes of the server."""
        await self.ask(SetLogLevel(level))

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; True if the KV cache is now empty."""
        return (await self.ask(ResetPrefixCache())).empty


#: The commands of operators, in the order of the docs.
OPERATOR_COMMANDS: tuple[type[OperatorCommand[Any, Any]], ...] = commands_of(OperatorCommand)
