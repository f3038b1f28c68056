"""What a command is: plain data that an engine runs, wherever the engine is, and what it answers.

Knows neither the operators' commands nor the engine. A command that an operator gives has a route
as well; last are the four that a server gives for its own routes.
"""

import asyncio
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar, cast, get_args

import msgspec
from msgspec import Meta, field

from aioserve.errors import AioserveError, EngineDeadError, RequestError

Answer = TypeVar("Answer")
Told = TypeVar("Told")

#: A text that must not be empty.
Text = Annotated[str, Meta(extra_json_schema={"minLength": 1})]
#: The name of a file or of a directory of the engine's machine.
FilePath = Annotated[str, Meta(extra_json_schema={"minLength": 1}, extra={"is_path": True})]


def _stated(cls: type[Any]) -> list[Any]:
    """Return the types in the brackets of its base, as `[bool, CacheReset]`; none if it is left
    open.
    """
    bases = cls.__dict__.get("__orig_bases__", ())
    return [kind for base in bases for kind in get_args(base) if not isinstance(kind, TypeVar)]


class Command(msgspec.Struct, Generic[Answer], frozen=True, tag=True):
    """A message that is answered with an `Answer`, or with an `AioserveError`."""

    answer_type: ClassVar[Any]  # `Answer`, for the process that decodes it

    def __init_subclass__(cls) -> None:
        """Keep the type that the class states in brackets: answers are decoded by it."""
        super().__init_subclass__()
        if stated := _stated(cls):
            cls.answer_type = stated[0]


class EngineCommand(Command[Answer], frozen=True):
    """A command that the engine itself runs."""

    async def run_on(self, engine: Any) -> Answer:
        """Run the command on an `AsyncEngine`, in its process. Every command defines this."""
        raise NotImplementedError  # a struct has no abstract methods: a test looks at all commands


class Http(NamedTuple):
    """The way in which a command is given over HTTP, and what the OpenAPI document says of it."""

    path: str
    summary: str
    method: Literal["GET", "POST", "DELETE"] = "POST"
    param: str | None = None  # the field at fault if the command cannot be done
    raises: tuple[type[AioserveError], ...] = (EngineDeadError,)  # besides what any body raises
    schema: str = ""  # the name of its body in the document, if it is not that of the class


class OperatorCommand(EngineCommand[Answer], Generic[Answer, Told], frozen=True):
    """A command that has a route among those of operators; its docstring is what docs say of it.

    `Told` is what HTTP answers with: JSON, or text if it is `str`.
    """

    http: ClassVar[Http]
    told_type: ClassVar[Any]  # `Told`

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if stated := _stated(cls):
            cls.told_type = stated[-1]

    def tell(self, answer: Answer) -> Told:
        """Return what HTTP answers with: the answer itself, where nothing else is wanted."""
        return cast(Told, answer)

    def refusal(self, error: AioserveError) -> RequestError:
        """Return what HTTP tells of a command that cannot be done: that the request is at fault."""
        return RequestError(str(error), param=self.http.param)

    def body(self) -> dict[str, Any]:
        """Return the fields as HTTP has them."""
        return {f.encode_name: getattr(self, f.name) for f in msgspec.structs.fields(self)}

    @classmethod
    def operation(cls) -> str:
        """Return the name of its method in Python, and of its operation in the OpenAPI document."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


def commands_of(base: Any) -> tuple[type[Any], ...]:
    """Return all commands that are derived from `base`, in the order in which they are declared."""
    found: list[type[Any]] = []
    for kind in base.__subclasses__():
        is_one = "answer_type" in kind.__dict__
        found += (kind,) if is_one else commands_of(kind)
    return tuple(found)


Running = Literal["keep", "abort"]  # what becomes of requests that run or wait
Arrivals = Literal["wait", "refuse"]  # and of those that come meanwhile
State = Literal["running", "paused", "asleep"]

#: Of an engine and its server: in the words of `Health`.
Readiness = Literal[
    "ready",
    "loading",
    "draining",
    "paused",
    "asleep",
    "failing",
    "stalled",
    "hanging",
    "silent",
    "dead",
]


class Health(msgspec.Struct, frozen=True):
    """The answer to whether a new request would be served now, and if not, why.

    `dead`: the engine has ended, for `reason`. `silent`: it does not answer its front end.
    `loading`, `draining`: not yet, no longer. `paused`, `asleep`: an operator wants it so.
    `failing`: the policy did something wrong, and no step has come back since. `stalled`: it
    serves none of the requests that wait. `hanging`: a step takes longer than
    `server.hung_step_seconds`. `ready` with a reason: a plain policy plans in the place of one that
    has failed.
    """

    status: Readiness = "ready"
    reason: str = ""


class Counted(msgspec.Struct, array_like=True):
    """The counts of one process, by values of labels: since it began, or now if it is a gauge."""

    name: str  # of the metric, without prefix and `_total`
    documentation: str
    labels: tuple[str, ...]
    counts: list[tuple[tuple[str, ...], int]]
    is_gauge: bool = False


def count_dropped_lines() -> Counted:
    """Return what this process has dropped of its logs."""
    from aioserve.support.logs import dropped_lines

    told = "Lines of logs, and frames of decision logs, dropped since their reader stood still"
    counts: list[tuple[tuple[str, ...], int]] = [
        ((n,), count) for n, count in dropped_lines.items()
    ]
    return Counted("log_lines_dropped", told, ("log",), counts)


class Seen(msgspec.Struct, frozen=True):
    """The frames that a watcher of the scheduler gets from `engine.live_feed`, in JSON."""

    number: int  # of the last frame: to be asked for what comes after it
    frames: list[bytes]


class Report(msgspec.Struct, frozen=True):
    """The result of a trial of another policy."""

    report_id: str  # to be asked for with `FindReport`
    num_requests: int  # that both policies were given
    num_missing: int  # requests more, and differences would have intervals
    on_these_requests: list[str]  # sentences on what the other policy changes for them
    has_intervals: bool  # whether differences have intervals, which are about other requests
    words: str  # the comparison as a table


class AdapterPaths(msgspec.Struct, frozen=True):
    """Adapters that can be asked for, by name, in the order in which they were loaded."""

    paths: dict[str, Path]


class Done(msgspec.Struct):
    """Response where there is nothing to tell."""

    status: Literal["ok"] = "ok"


# What a server asks an engine for its own routes: no operator gives these four commands.


class HealthCheck(EngineCommand[Health], frozen=True):
    """How the engine is; one that is dead answers, too."""

    async def run_on(self, engine: Any) -> Health:
        health: Health = engine.health()
        return health


class ShowMetrics(EngineCommand[bytes], frozen=True):
    """Prometheus' text, of the whole. `counted` is what a server in the engine's process has
    counted; other processes are asked for theirs.
    """

    counted: list[Counted] = field(default_factory=list)

    async def run_on(self, engine: Any) -> bytes:
        name = "aioserve.engine.exposition"
        if name not in sys.modules:  # the import takes a while; what it makes belongs to the loop
            await asyncio.to_thread(import_module, name)
        text: bytes = engine.internals.render_metrics(self.counted)
        return text


class ShowSteps(EngineCommand[Seen], frozen=True):
    """The command behind `LiveFeed.look`: answered when there is something to see."""

    after: int

    async def run_on(self, engine: Any) -> Seen:
        seen: Seen = await engine.internals.look(self.after)
        return seen


class AbortElsewhere(EngineCommand[bool], frozen=True):
    """Ends a request, or a response of several, of another front end; whether there was one."""

    request_id: str
    reach: str = ""  # the owner that it must have; "" matches every owner

    async def run_on(self, engine: Any) -> bool:
        """Return False: an engine that is asked directly has no other front end."""
        return False
