"""LoRA adapters: read from PEFT directories, loaded and unloaded, added to products row by row."""

from collections.abc import Collection

from aioserve.kv_cache.resource import Resource
from aioserve.request import Request, WaitReason


class AdapterSlots(Resource):
    """Places for adapters, one for all requests that have the same."""

    name = "adapters"

    def __init__(self, max_adapters: int) -> None:
        self.max_adapters = max_adapters
        self._held: dict[Request, str] = {}

    def shortage(self, request: Request, gone: Collection[Request] = ()) -> WaitReason | None:
        if not request.adapter_id:
            return None
        held = {adapter_id for r, adapter_id in self._held.items() if r not in gone}
        adapters = held | {request.adapter_id}
        is_held = len(adapters) == len(held)
        return None if is_held or len(adapters) <= self.max_adapters else WaitReason.ADAPTERS

    def take(self, request: Request, num_blocks: int, num_shared_tokens: int) -> None:
        if request.adapter_id:
            self._held[request] = request.adapter_id

    def resume(self, request: Request) -> None:
        self.take(request, 0, 0)

    def pause(self, request: Request) -> None:
        self.give_back(request)

    def leave(self, request: Request) -> None:
        self._held.pop(request, None)

    def give_back(self, request: Request) -> None:
        self._held.pop(request, None)

    def held(self) -> str:
        num = len(set(self._held.values()))
        return f"{num} places for adapters" if num else ""

    def follow(self, other: "AdapterSlots") -> None:
        self.max_adapters = other.max_adapters
