"""An operator loads and unloads adapters, by vLLM's routes."""

from typing import TYPE_CHECKING

from msgspec import field

from aioserve.errors import (
    AioserveError,
    EngineDeadError,
    RequestError,
    UnknownAdapterError,
    UnknownModelError,
)
from aioserve.model_source.adapter import NoAdapterError
from aioserve.operations.command import Asking, FilePath, Http, OperatorCommand, Text

if TYPE_CHECKING:
    from aioserve.engine import AsyncEngine


class LoadAdapter(OperatorCommand[None, str], frozen=True):
    """The adapter in the directory `"lora_path"` is served under the name `"lora_name"` from now
    on; other requests run on meanwhile. See [adapters](adapters.md).
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
    """The adapter `"lora_name"` is served no more; requests that have it finish."""

    name: Text = field(name="lora_name")

    http = Http(
        "/v1/unload_lora_adapter",
        "Serve it no more: requests that have it finish.",
        raises=(EngineDeadError, UnknownModelError),
        schema="UnloadRequest",
    )

    async def run_on(self, engine: "AsyncEngine") -> None:
        engine.adapters.unload(self.name)

    def tell(self, answer: None) -> str:
        return f"Success: LoRA adapter {self.name!r} removed successfully."


class AdapterMethods(Asking):
    """Load and unload adapters from Python, as the commands above do over HTTP."""

    async def load_adapter(self, name: str, path: str) -> None:
        """Serve an adapter, a directory of the server's machine, under that name."""
        await self.ask(LoadAdapter(name, path))

    async def unload_adapter(self, name: str) -> None:
        """Serve the adapter no more; requests that have it finish."""
        await self.ask(UnloadAdapter(name))
