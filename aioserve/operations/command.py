"""What a command is: plain data that an engine runs, wherever the engine is.

Knows neither the commands nor the engine. A command that an operator gives has a route as well.
"""

import re
from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar, cast, get_args

import msgspec
from msgspec import Meta

from aioserve.errors import AioserveError, EngineDeadError, RequestError

Answer = TypeVar("Answer")
Told = TypeVar("Told")

#: A text that must not be empty.
Text = Annotated[str, Meta(extra_json_schema={"minLength": 1})]
#: The name of a file or of a directory of the engine's machine.
FilePath = Annotated[str, Meta(extra_json_schema={"minLength": 1}, extra={"is_path": True})]


def _stated(cls: type[Any]) -> list[Any]:
    """The types in the brackets of its base, as `[bool, CacheReset]`; none if it is left open."""
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
    """How a command is given over HTTP, and what the OpenAPI document says of that."""

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
        """What HTTP answers with: the answer itself, where nothing else is wanted."""
        return cast(Told, answer)

    def refusal(self, error: AioserveError) -> RequestError:
        """What HTTP tells of a command that cannot be done: that the request is at fault."""
        return RequestError(str(error), param=self.http.param)

    def body(self) -> dict[str, Any]:
        """The fields as HTTP has them."""
        return {f.encode_name: getattr(self, f.name) for f in msgspec.structs.fields(self)}

    @classmethod
    def operation(cls) -> str:
        """The name of its method in Python, and of its operation in the OpenAPI document."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


class Asking(ABC):
    """Base of the typed methods that stand beside commands: what has `ask` has them all."""

    @abstractmethod
    async def ask(self, command: OperatorCommand[Any, Told]) -> Told:
        """Give the command, and return what HTTP answers with."""


def commands_of(base: Any) -> tuple[type[Any], ...]:
    """All commands that are derived from `base`, in the order in which they are declared."""
    found: list[type[Any]] = []
    for kind in base.__subclasses__():
        is_one = "answer_type" in kind.__dict__
        found += (kind,) if is_one else commands_of(kind)
    return tuple(found)
