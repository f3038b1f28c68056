"""The verb run_decodes plans what a loop over run would, whatever the requests are like."""

from contextlib import suppress
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve.errors import EngineOverloadedError, RequestError
from aioserve.scheduler import BaseScheduler, SchedulerOutput
from aioserve.testing import SchedulerHarness
from aioserve.testing.state_machine import harness_settings, requests
from tests.slow import examples
from tests.testing.broken import SoundScheduler  # a loop over run, then over admit


class ByVerb(BaseScheduler):
    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in step.run_decodes():
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()


def steps_of(
    policy: type[BaseScheduler], options: dict[str, Any], traffic: list[tuple[dict[str, Any], int]]
) -> tuple[list[bytes], dict[str, list[int]]]:
    """All decisions and all tokens; each request comes some steps after the one before."""
    harness = SchedulerHarness(policy, **options)
    for i, (request, num_steps) in enumerate(traffic):
        for _ in range(num_steps):
            harness.step()
        request = dict(request)
        prompt = request.pop("prompt_token_ids")[: harness.max_model_len - 1]
        if (deadline := request.pop("deadline", None)) is not None:
            request["deadline"] = harness.now + deadline
        with suppress(EngineOverloadedError, RequestError):
            harness.add_request(f"r{i}", prompt, **request)
    harness.run_until_idle()
    return [msgspec.msgpack.encode(step) for step in harness.steps], harness.tokens


@settings(max_examples=examples(12, slow=80), deadline=None)
@given(harness_settings(), st.lists(st.tuples(requests(), st.integers(0, 3)), max_size=8))
def test_it_plans_what_a_loop_would(
    options: dict[str, Any], traffic: list[tuple[dict[str, Any], int]]
) -> None:
    assert steps_of(ByVerb, options, traffic) == steps_of(SoundScheduler, options, traffic)


def test_it_returns_who_is_still_in_the_prompt() -> None:
    left: list[list[str]] = []

    class Watched(ByVerb):
        def schedule(self) -> SchedulerOutput:
            step = self.new_step()
            prefills = step.run_decodes()
            left.append([r.request_id for r in prefills])
            for request in prefills:
                step.run(request)
            for request in self.waiting:
                step.admit(request)
            return step.output()

    harness = SchedulerHarness(Watched, max_num_batched_tokens=8)
    harness.add_request("short", [1, 2, 3], max_tokens=3)
    harness.add_request("long", list(range(18)), max_tokens=2)
    harness.run_until_idle()
    # 5 of the long prompt's tokens in the first step, 7 in the second, the rest in the third.
    assert left[:4] == [[], ["long"], ["long"], []]
