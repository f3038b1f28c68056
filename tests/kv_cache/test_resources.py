"""What is off costs no call, and a new kind of cache is one class that is handed to the manager."""

from collections.abc import Collection, Mapping
from typing import Any

from aioserve.kv_cache import KVCacheManager, Resource
from aioserve.request import EncoderInput, Request, WaitReason
from aioserve.testing import SchedulerHarness
from tests.testing.broken import SoundScheduler


class Desks(Resource):
    """One for each running request; the runner is told which is whose."""

    name = "desks"

    def __init__(self, num_desks: int) -> None:
        self._free = list(range(num_desks))
        self._taken: dict[Request, int] = {}

    def shortage(self, request: Request, gone: Collection[Request]) -> WaitReason | None:
        is_free = self._free or any(r in self._taken for r in gone)
        return None if is_free else WaitReason.BLOCKS

    def take(self, request: Request, num_blocks: int, num_shared_tokens: int) -> None:
        self._taken[request] = self._free.pop()

    def give_back(self, request: Request) -> None:
        if (desk := self._taken.pop(request, None)) is not None:
            self._free.append(desk)

    def held(self) -> str:
        return f"{len(self._taken)} desks" if self._taken else ""

    def plan(self, tokens: dict[Request, int], step_id: int) -> Mapping[str, Any]:
        return {request.request_id: self._taken[request] for request in tokens}


def test_a_new_kind_of_cache_limits_who_runs_and_tells_the_runner() -> None:
    harness = SchedulerHarness(SoundScheduler)
    desks = Desks(1)
    harness.kv_cache._use([desks, *harness.kv_cache.resources])
    for name in "ab":
        harness.add_request(name, [1] * 5, max_tokens=3)
    output = harness.schedule()
    assert output.parts == {"desks": {"a": 0}}
    assert harness.scheduler.get_wait_reasons() == {"b": WaitReason.BLOCKS}
    assert desks.held() == "1 desks"
    harness.run_until_idle()
    assert harness.finished == {"a": "length", "b": "length"}


def test_steps_of_text_ask_no_resource_until_a_request_comes_that_needs_one() -> None:
    harness = SchedulerHarness(SoundScheduler)
    kv_cache: KVCacheManager = harness.kv_cache
    harness.add_request("text", [1] * 5, max_tokens=3)
    harness.step()
    assert kv_cache.resources == kv_cache.planning == kv_cache.holding == ()
    image = EncoderInput(0, 2, "image")
    harness.add_request("seeing", [1] * 5, encoder_inputs=[image], max_tokens=3)
    assert [resource.name for resource in kv_cache.planning] == ["encoder"]
    harness.add_request("adapted", [1] * 5, adapter_id="one", max_tokens=3)
    assert [resource.name for resource in kv_cache.resources] == ["adapters", "encoder"]
    assert [resource.name for resource in kv_cache.planning] == ["encoder"]
    harness.run_until_idle()
