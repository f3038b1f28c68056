"""What the engine needs from a runner, which computes tokens. Free of torch.

Two implementations of the core: `cpu.runner.ThreadedRunner` (the model on the CPU, on a thread of
its own) and `simulated.SimulatedRunner` (a step-time model on the loop's clock); parts bring others
(`RUNNERS`): the model on a device that computes asynchronously, or shared out over processes.
Begins with what a runner can do, which the engine, its API workers and Ray replicas pass on whole,
so that a new capability is one field here, one line in the runner that has it and one in the code
that asks for it. Last, the words in which all of them say that a row of logits gives no token.
"""

import asyncio
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError, place_of
from aioserve.kv_cache import BLOCKS, WindowSpec
from aioserve.outputs import ModelRunnerOutput
from aioserve.params import RUNNER_PARAMETERS
from aioserve.request import Request, RequestStatus
from aioserve.scheduler.output import SchedulerOutput
from aioserve.scheduler.results import computed_by
from aioserve.support.parts import Brought

if TYPE_CHECKING:
    from aioserve.config import EngineConfig, StructuredOutputsConfig
    from aioserve.kv_cache import KVConnectorMetadata
    from aioserve.model_source.info import ModelInfo
    from aioserve.params import StructuredOutputs


# What a runner can do and has room for, as one value.


class RunnerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that are known when a runner has loaded; they stay true for the runner's life."""

    #: Size of the KV pool, in blocks of `block_size` tokens.
    num_kv_blocks: int
    #: Steps to hand over before the first is back, where the settings do not say.
    pipeline_depth: int = 1
    #: Slots for the states of requests, of a model whose layers have states of a fixed size.
    num_state_slots: int | None = None
    #: What layers with a sliding window get, if they have a pool of their own.
    windows: WindowSpec | None = None
    #: Those of `params.RUNNER_PARAMETERS` that it serves; others are refused.
    parameters: frozenset[str] = frozenset()
    #: Whether outputs have vectors of prompts (`pooled`).
    supports_pooling: bool = False
    #: Whether the encoder inputs of requests are run.
    supports_images: bool = False
    #: Most draft tokens that are proposed for a request after a step; 0: none ever are.
    max_draft_tokens: int = 0
    #: Whether outputs have the values of rows that a policy wants (`row_values`).
    gives_row_values: bool = False
    #: Whether a policy can set the card's clock (`set_frequency`).
    sets_frequency: bool = False


def parameters_of(halves: object) -> frozenset[str]:
    """Return `parameters` of a runner that serves whatever its model allows. `halves` are those of
    the model, by which it gives the logits of prompts; None: it cannot be taken apart.
    """
    return frozenset(RUNNER_PARAMETERS) - ({"prompt_logprobs"} if halves is None else set())


# How many KV blocks requests can use, wherever they lie. Knows settings, no memory.


PREFIX_SHARE = 0.25  # of what all requests can use: room for prefixes of those that have left
TYPICAL_TOKENS = 2048  # of a request, for which several pools are made to last as long; a guess


def max_useful_blocks(config: EngineConfig, max_model_len: int) -> int:
    """Return blocks of `max_num_seqs` requests of `max_model_len` tokens, and `PREFIX_SHARE`
    more.
    """
    num_blocks = config.scheduler.max_num_seqs * -(-max_model_len // config.cache.block_size)
    if config.cache.enable_prefix_caching:
        num_blocks += int(num_blocks * PREFIX_SHARE)
    return num_blocks


def window_spec(
    config: EngineConfig, max_model_len: int, num_tokens: int, num_blocks: int | None = None
) -> WindowSpec:
    """Return the spec of layers that see `num_tokens` tokens, with `num_blocks` blocks; by default
    as many as `max_num_seqs` requests use.
    """
    spec = WindowSpec(
        num_tokens,
        0,
        max_chunk=config.scheduler.max_chunk(max_model_len),
        max_drafts=max(
            config.cache.block_size,  # what a grammar forces comes as drafts, too
            config.speculation.num_speculative_tokens,
            config.runner.simulated_draft_tokens,
        ),
    )
    if num_blocks is None:
        num_seqs = config.scheduler.max_num_seqs
        num_blocks = useful_window_blocks(config, spec, max_model_len, num_seqs)
    return msgspec.structs.replace(spec, num_blocks=num_blocks)


def useful_window_blocks(
    config: EngineConfig, spec: WindowSpec, max_model_len: int, num_seqs: int
) -> int:
    """Return the blocks that `num_seqs` requests use behind their prompts, with room for two
    prompts of `TYPICAL_TOKENS`, and `PREFIX_SHARE` of it more; one of `max_model_len` fits at
    least.
    """
    size = config.cache.block_size
    longest = -(-max_model_len // size)
    each = min(spec.num_decode_blocks(size), longest)
    prompt = spec.num_request_blocks(min(TYPICAL_TOKENS, max_model_len), max_model_len, size)
    num_blocks = num_seqs * each + 2 * (prompt - each)
    if config.cache.enable_prefix_caching:
        num_blocks += int(num_blocks * PREFIX_SHARE)
    return max(num_blocks, spec.num_request_blocks(max_model_len, max_model_len, size))


# The runner, and what it is given.


class OutputCompiler(ABC):
    """Compiles structured outputs to what binds the texts of requests. Used from the event loop."""

    @abstractmethod
    async def prepare(self) -> None:
        """Make what all structured outputs share, or find out why that cannot be. To be called when
        the runner is loaded.
        """

    @abstractmethod
    async def check(self, wanted: "StructuredOutputs") -> None:
        """Compile `wanted`, for requests that come with this very object. Raises `RequestError` for
        what cannot be, takes too long or too much memory, and `EngineOverloadedError` if that is
        the others' fault.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back threads and processes. Idempotent."""


class AdapterFiles(Protocol):
    """A LoRA adapter as it lies on disk, for the part that puts adapters on models."""

    @property
    def path(self) -> Path: ...

    @property
    def digest(self) -> str:
        """A hash of all its files: equal for equal weights."""


class SlotGroup(NamedTuple):
    """Slots of one size in host memory, for what the runner keeps under one name."""

    name: str  # of the pool whose contents they take
    num_slots: int
    block_bytes: int


class KVConnectorWorker:
    """The runner's side: slots of host memory, each with room for one block of all layers. What is
    copied in a step is there when the step is back.
    """

    num_slots: int
    block_bytes: int
    num_loaded: int = 0  # blocks, since the start
    load_seconds: float = 0.0  # that they took

    @property
    def groups(self) -> Sequence[SlotGroup]:
        """The slots of each pool, which are numbered from 0 in each. By default those of the KV
        blocks alone.
        """
        return [SlotGroup(BLOCKS, self.num_slots, self.block_bytes)]

    @property
    def num_bytes_loaded(self) -> int:
        """Bytes copied into the paged cache since the start."""
        return self.num_loaded * self.block_bytes


class HostCopies(Protocol):
    """The side of a KV connector that a part brings: what it keeps of a model, and its copies in
    host memory.
    """

    def make(self, num_bytes: int, shared: Any = None) -> KVConnectorWorker:
        """Make room for blocks of at most `num_bytes`; `shared` with the other ranks."""

    def take(self, blocks: Any) -> None:
        """Go on with what `make` has returned beside caches of the same sizes."""

    def transfer(self, transfers: "KVConnectorMetadata") -> None:
        """Copy what a KV connector wants copied before a step."""

    @property
    def bytes_of_first(self) -> dict[str, int]:
        """Bytes of a block that the first of several ranks has beside the others, by the pool."""

    def close(self) -> None:
        """Let go of blocks in host memory, and of all tensors. Idempotent."""


class RunnerInterface(ABC):
    """Runs steps in the order in which they are handed over. Used from one event loop."""

    #: What its masks are made by. None: it masks nothing, and structured outputs are refused.
    grammars: OutputCompiler | None = None

    @abstractmethod
    async def load(self) -> RunnerInfo:
        """Load weights and allocate the KV cache; return what the runner can do and has room for.
        Raises `ConfigError` if that cannot work.
        """

    def make_kv_worker(self, num_bytes: int) -> KVConnectorWorker:
        """Make the worker that copies blocks between the KV cache and at most `num_bytes` of host
        memory, as steps tell it; after `load`. Raises `ConfigError`.
        """
        raise ConfigError("this engine's runner has no KV connector (cache.kv_connector)")

    @property
    def num_compute_threads(self) -> int | None:
        """Threads of this machine that compute steps now; None if a step needs none."""
        return None

    async def load_adapter(self, adapter_id: str, files: AdapterFiles) -> None:
        """Take requests of this adapter id from now on, beside steps; one that it has is replaced.
        Raises `ConfigError` for an adapter that is not of its model.
        """
        raise ConfigError("this engine's runner serves no adapters")

    def unload_adapter(self, adapter_id: str) -> None:  # noqa: B027 - it has none
        """Forget an adapter after the steps that were handed over: no later step has it."""

    def check_sleep(self, *, frees_weights: bool) -> None:
        """Raises `ConfigError` if `sleep` is not served."""
        raise ConfigError("sleep is not served by this engine's runner")

    async def sleep(self, *, frees_weights: bool) -> None:  # noqa: B027 - it has none
        """Give back the memory of the KV cache, or of weights and all, until `wake`. No step is
        handed over meanwhile, and no later one reads what earlier ones wrote.
        """

    async def wake(self) -> None:  # noqa: B027 - it has none
        """Be as after `load`, with as many blocks as before. Raises `ConfigError` if that cannot
        be; it sleeps on then.
        """

    async def check_weights(self, path: str) -> None:
        """Raises `ConfigError` if `load_weights` is not served, or not for the model in directory
        `path`: it differs in more than its weights.
        """
        raise ConfigError("reload is not served by this engine's runner")

    async def load_weights(self, path: str) -> None:  # noqa: B027 - it has none
        """Load the weights of a model directory in the place of those that serve, between two
        steps; also instead of `wake`. No later step reads what earlier ones wrote. Raises
        `ConfigError` as `check_weights` does, or if they cannot be read, or have no room (beside
        the old ones, where these are not freed first); the old ones serve on then.
        """

    def check(self) -> None:  # noqa: B027 - it can
        """Raises `RunnerDeadError` if no further step can run."""

    def watch(self, on_death: Callable[[], None]) -> None:  # noqa: B027 - it does not die alone
        """Call `on_death`, on the loop, when `check` begins to raise, also if no step is in flight;
        one that is raises as well.
        """

    @abstractmethod
    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> "asyncio.Future[ModelRunnerOutput]":
        """Start one step and return its result to be awaited.

        The step runs after all earlier ones. An exception in the future fails the requests of
        this step only; `RunnerDeadError` says that no further step can run. A step without tokens
        just tells the runner which requests have left.
        """

    @abstractmethod
    async def close(self) -> None:
        """Wait for the step that runs, then give back threads and memory. Idempotent."""


#: The runners that parts bring, by where they compute. Raise `ConfigError` for what cannot be.
RUNNERS: "Brought[Callable[[EngineConfig, ModelInfo], RunnerInterface]]" = Brought("runners")

#: What compiles structured outputs, by whose work it does so.
OUTPUT_COMPILERS: "Brought[Callable[[ModelInfo, StructuredOutputsConfig], OutputCompiler]]" = (
    Brought("output compilers")
)


#: Fields of a `ModelRunnerOutput` that tell something of requests by their ids.
_BY_REQUEST = (
    *("logprobs", "draft_token_ids", "failed", "prompt_logprobs", "pooled"),
    "row_values",
)
_MOST_TOKENS = 2**31  # ids of tokens are below


async def load_runner(runner: RunnerInterface) -> RunnerInfo:
    """Return what `runner.load()` returns. Raises what it raises, and `ConfigError` that names the
    method and its line where that is no `RunnerInfo`.
    """
    if not isinstance(runner, RunnerInterface):
        raise ConfigError(f"a runner is a RunnerInterface, got {runner!r:.100}")
    method = _method(runner, "load")
    loading: object = runner.load()
    if not inspect.isawaitable(loading):
        raise ConfigError(f"{method} must be async and return a RunnerInfo, got {loading!r:.100}")
    info = await loading
    if not isinstance(info, RunnerInfo):
        raise ConfigError(f"{method} must return a RunnerInfo, got {info!r:.100}")
    return info


def check_started(runner: RunnerInterface, future: object) -> None:
    """Raises `TypeError` if that is not what `execute_model` has to return."""
    if not asyncio.isfuture(future):
        raise TypeError(
            f"{_method(runner, 'execute_model')} must return an asyncio.Future of a "
            f"ModelRunnerOutput, got {future!r:.100}"
        )


def check_result(
    runner: RunnerInterface,
    output: SchedulerOutput,
    result: object,
    request_of: Callable[[str], Request | None] | None = None,
) -> None:
    """Raises `TypeError` if `result` is not one of the step of `output`: of another type, with
    tokens of another number of requests or that are no token ids, with log probabilities of another
    number of tokens, or without a token of a request that was to get one, which would wait for
    ever. `request_of` knows the unfinished requests by id.
    """
    if not isinstance(result, ModelRunnerOutput):
        raise _wrong_result(runner, f"must be a ModelRunnerOutput, got {result!r:.100}")
    if not output.total_num_scheduled_tokens:
        return
    for name in _BY_REQUEST:
        if not isinstance(found := getattr(result, name), dict):
            raise _wrong_result(runner, f"must have a dict as {name}, got {found!r:.100}")
    for name in ("sampled_token_ids", "sat_out"):
        if not isinstance(found := getattr(result, name), list):
            raise _wrong_result(runner, f"must have a list as {name}, got {found!r:.100}")
    num_rows, num_told = len(output.num_scheduled_tokens), len(result.sampled_token_ids)
    if num_rows != num_told:
        raise _wrong_result(
            runner, f"has sampled_token_ids of {num_told} requests; the step has {num_rows}"
        )
    is_any_empty = False
    given: list[object] = [*result.sampled_token_ids]
    for token_ids in given:
        if not isinstance(token_ids, list):
            raise _wrong_result(runner, f"has {token_ids!r:.100} where token ids of a request go")
        is_any_empty |= not token_ids
        for token_id in token_ids:
            if type(token_id) is not int or not 0 <= token_id < _MOST_TOKENS:
                raise _wrong_result(runner, f"has {token_id!r:.100} among token ids")
    if is_any_empty and request_of is not None:
        _check_silent(runner, output, result, request_of)
    if result.logprobs:
        rows = zip(output.num_scheduled_tokens, result.sampled_token_ids, strict=True)
        for name, token_ids in rows:
            told_of = result.logprobs.get(name)
            if told_of is not None and len(told_of) != len(token_ids):
                raise _wrong_result(
                    runner,
                    f"has logprobs of {len(told_of)} tokens for a request with {len(token_ids)}",
                )


def _check_silent(
    runner: RunnerInterface,
    output: SchedulerOutput,
    result: ModelRunnerOutput,
    request_of: Callable[[str], Request | None],
) -> None:
    """Raises `TypeError` for a request whose tokens are all computed, and that gets no new one."""
    computed = computed_by(output)
    rows = zip(output.num_scheduled_tokens, result.sampled_token_ids, strict=True)
    for name, token_ids in rows:
        if token_ids or name in result.sat_out or name in result.failed:
            continue
        request = request_of(name)
        if request is None or request.pooling_params is not None:
            continue
        num_drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
        is_running = request.status is RequestStatus.RUNNING
        if is_running and computed[name] - num_drafts == request.num_tokens:
            raise _wrong_result(
                runner, f"has no token of a request whose {request.num_tokens} tokens are computed"
            )


def _method(runner: RunnerInterface, name: str) -> str:
    kind = type(runner)
    return f"{kind.__name__}.{name}(){place_of(kind, name)}"


def _wrong_result(runner: RunnerInterface, what: str) -> TypeError:
    return TypeError(f"the result of {_method(runner, 'execute_model')} {what}")


# How it is said that a row of logits gives no token, or that weights are no numbers. Knows words
# and numbers; knows nothing about how either was found.


NOT_FINITE = (
    "the model gives no numbers for this request (NaN or infinity among its logits), as damaged "
    "weights do"
)
NOTHING_LEFT = "no token is left that may come next in this request"


def why_unsound(best: float) -> str:
    """Return why nothing can be chosen from a row of logits whose largest is `best`, which is not
    finite. It is minus infinity if all tokens are masked.
    """
    return NOTHING_LEFT if best == -math.inf else NOT_FINITE


def step_failed(error: BaseException) -> str:
    """Return the text for the client of a request for which something unforeseen was raised. An
    error may quote anything, so only its type is told; the log has it all.
    """
    return f"the step that served this request failed ({type(error).__name__})"


def failed_requests(
    failed: Mapping[int, str], sampling: Sequence[int], kept: Sequence[Sequence[int]]
) -> dict[int, str]:
    """Return which rows of a step fail because of the samples that did, by their places among the
    S, and why. `sampling` is the row of each sample, `kept` are the tokens that each row has kept:
    what was sampled behind a wrong draft does not count.
    """
    found: dict[int, str] = {}
    for place, why in failed.items():
        row = sampling[place]
        if place - sampling.index(row) < len(kept[row]):
            found[row] = why
    return found
