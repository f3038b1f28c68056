"""Parts of a policy order vLLM's own scheduler, also where aioserve's refuses to start."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

import torch
from vllm import LLM, SamplingParams
from vllm.multimodal.inputs import PlaceholderRange
from vllm.v1.request import Request as TheirRequest

from aioserve.errors import ConfigError
from aioserve.scheduler import OrderPart, Request
from aioserve.vllm import PolicyScheduler, Scheduler
from aioserve.vllm.policy_scheduler import Line
from tests.models import make_model
from tests.vllm.inside import (
    TIGHT,
    Served,
    a_load,
    check_equal,
    core_of,
    exchange,
    give_back,
    make_engine,
    serve,
)

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

HERE = str(Path(__file__))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = make_engine(**TIGHT)
    yield llm
    core_of(llm).shutdown()


@pytest.fixture(scope="module")
def theirs(llm: LLM) -> Served:
    give_back(llm)
    return serve(llm, a_load(60))


def ids(first: int, count: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": list(range(first, first + count))}


def first_served(llm: LLM, requests: dict[str, dict[str, Any]], steps: int = 300) -> list[str]:
    """Of requests that all wait at first: in which order their first tokens come."""
    engine, found = llm.llm_engine, []
    for i, (name, fields) in enumerate(requests.items()):
        extra = {"user": fields.get("user", "")}
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, extra_args=extra)
        engine.add_request(name, ids(5 + 60 * i, 60), params, priority=fields.get("priority", 0))
    for _ in range(steps):
        if not engine.has_unfinished_requests():
            break
        found += [o.request_id for o in engine.step() if o.request_id not in found]
    return found


@pytest.mark.parametrize("order", ["arrival", "fair", "priority", "hrrn", "deadline"])
def test_replies_are_those_of_vllms_own_order(llm: LLM, theirs: Served, order: str) -> None:
    """With preemptions, samples, aborts and shared prefixes."""
    scheduler = exchange(llm, PolicyScheduler, order=order)
    check_equal(serve(llm, a_load(60)), theirs)
    assert scheduler.parts.error is None
    assert not scheduler.parts.observed.requests
    assert not scheduler.parts.policy.get_requests()
    assert scheduler.get_request_counts() == (0, 0)


def test_a_waiting_request_is_admitted_by_the_order_of_the_part(llm: LLM) -> None:
    """A step has room for one prompt."""
    urgency = {"a": 2, "b": 0, "c": 1, "d": 0, "e": -1}
    requests = {name: {"priority": value} for name, value in urgency.items()}
    chunk = {"part": "chunk", "chunk_size": 64}
    exchange(llm, PolicyScheduler, order="priority", budget=chunk)
    assert first_served(llm, requests) == ["e", "b", "d", "c", "a"]
    exchange(llm, PolicyScheduler, order="arrival", budget=chunk)
    assert first_served(llm, requests) == ["a", "b", "c", "d", "e"]


def test_a_client_with_many_requests_gives_way_to_one_with_few(llm: LLM) -> None:
    requests = {f"heavy{i}": {"user": "heavy"} for i in range(8)}
    requests |= {f"light{i}": {"user": "light"} for i in range(2)}
    exchange(llm, PolicyScheduler, order="fair", budget={"part": "chunk", "chunk_size": 64})
    assert {"light0", "light1"} <= set(first_served(llm, requests)[:4])


def test_what_is_no_deadline_counts_as_none(llm: LLM) -> None:
    scheduler = exchange(llm, PolicyScheduler, order="deadline")
    for name, deadline in {"odd": -1, "text": "soon", "late": 60.0}.items():
        params = SamplingParams(max_tokens=4, extra_args={"deadline": deadline})
        scheduler.parts.add(TheirRequest(name, [1] * 20, params, None))
    waiting = scheduler.parts.policy.waiting
    assert {request.request_id: request.deadline is None for request in waiting} == {
        "odd": True,
        "text": True,
        "late": False,
    }
    assert scheduler.parts.error is None


def test_requests_that_vllm_alone_can_serve_have_their_place_in_the_order(llm: LLM) -> None:
    """Prompt embeddings, and images that share a place, as those of a video and its sound do;
    streaming input comes behind the others.
    """
    scheduler = exchange(llm, PolicyScheduler, order="priority")
    line = Line(scheduler.parts)
    params = SamplingParams(max_tokens=4)
    shared: Any = [
        SimpleNamespace(identifier=name, mm_position=PlaceholderRange(offset=offset, length=8))
        for name, offset in (("video", 3), ("sound", 5))
    ]
    embeds = torch.zeros(9, 4)
    for request in (
        TheirRequest("last", [1] * 20, params, None, priority=2),
        TheirRequest("embeds", None, params, None, prompt_embeds=embeds, priority=1),
        TheirRequest("images", [1] * 20, params, None, mm_features=shared, priority=0),
        TheirRequest("stream", [1] * 20, params, None, resumable=True, priority=-1),
    ):
        scheduler.parts.add(request)
        line.add_request(request)
    assert scheduler.parts.error is None
    policy = scheduler.parts.policy
    waiting = [(request.request_id, request.num_tokens) for request in policy.waiting]
    assert waiting == [("images", 20), ("embeds", 9), ("last", 20)]
    assert not scheduler.parts.knows("stream")
    scheduler.parts.begin([])
    order = [line.pop_request().request_id for _ in range(4)]
    assert order == ["images", "embeds", "last", "stream"]


class Fails(OrderPart):
    """Raises when the third request comes."""

    num_asked = 0

    def key(self, request: Request) -> float:
        self.num_asked += 1
        if self.num_asked > 2:
            raise ValueError("planted")
        return request.arrival_time


def test_a_part_that_fails_is_asked_no_more_and_vllm_goes_on(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = exchange(llm, PolicyScheduler, order=f"{HERE}:Fails")
    served = first_served(llm, {name: {} for name in "abcdef"})
    assert sorted(served) == list("abcdef")
    assert "planted" in str(scheduler.parts.error)
    assert caplog.text.count("vLLM's own order counts from now on") == 1


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({}, "needs the parts of a policy"),
        ({"policy": "fair"}, "and not policy"),
        ({"order": "no such"}, "no such"),
        ({"order": "fair", "budget": "latency_budget"}, r"its for_prompts\(\) has no counterpart"),
        ({"order": "fair", "admission": ["deadline"]}, "and not admission"),
    ],
)
def test_what_vllms_scheduler_cannot_do_is_refused(
    llm: LLM, stated: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        exchange(llm, PolicyScheduler, **stated)
    assert isinstance(exchange(llm), Scheduler)


def test_a_model_that_our_scheduler_refuses_is_served_in_the_same_order(tmp_path: Path) -> None:
    """Layers of full attention and of sliding windows, so several KV cache groups, and asynchronous
    scheduling. The last test here: an engine that is shut down takes vLLM's process groups with it.
    """
    model = make_model("gemma2", tmp_path, head_dim=64, max_position_embeddings=512)
    own = {"model": str(model), "skip_tokenizer_init": True, "max_model_len": 320}
    llm = make_engine(asynchronous=True, **TIGHT | own)
    load = [
        asked._replace(prompt=[token % 90 for token in asked.prompt])
        for asked in a_load(40, samples=False)
    ]
    for asked in load:
        asked.params.update(detokenize=False)
        asked.params.pop("logprobs", None)
        asked.params.pop("prompt_logprobs", None)
    theirs = serve(llm, load)
    with pytest.raises(ConfigError, match="KV cache groups"):
        exchange(llm)
    scheduler = exchange(llm, PolicyScheduler, order="priority")
    assert len(scheduler.kv_cache_config.kv_cache_groups) > 1
    check_equal(serve(llm, load), theirs)
    assert scheduler.parts.error is None
    core_of(llm).shutdown()
