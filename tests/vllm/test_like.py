"""The preset `like: vllm` beside vLLM's own scheduler: the same times, request by request."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from aioserve.config import EngineConfig
from aioserve.config.load import LIKE
from aioserve.errors import ConfigError
from aioserve.lab.reproduce.claims.scheduling import ShortestPromptScheduler
from aioserve.lab.simulation.outcome import RunOutcome
from aioserve.lab.simulation.run import simulate, simulated
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest
from aioserve.request import Request
from aioserve.testing import SchedulerHarness
from aioserve.vllm.foreign import VLLMScheduler

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

SHORTEST = f"{ShortestPromptScheduler.__module__}:{ShortestPromptScheduler.__name__}"
LATEST = "tests.vllm.test_like:LatestFirst"
BUDGET = 256


class LatestFirst(ShortestPromptScheduler):
    """The request that came last goes first: the last admitted is seldom the last in order."""

    def order(self, request: Request) -> float:  # type: ignore[override]
        return -request.arrival_time


def crowd(count: int = 160) -> Workload:
    """Prompts of 5 to 300 tokens, every third with 64 tokens in common, and replies of 3 to 90;
    twice as many as 160 KV blocks hold.
    """
    requests = []
    for i in range(count):
        common = [Piece(1, 64)] if i % 3 == 1 else []
        pieces = (*common, Piece(100 + i, 5 + 37 * i % 232))
        requests.append(WorkloadRequest(0.006 * i, pieces, 3 + 29 * i % 88))
    return Workload("crowd", tuple(requests))


def served(policy: str, options: dict[str, object], *settings: tuple[str, object]) -> RunOutcome:
    given = [
        ("scheduler.policy", policy),
        ("scheduler.options", options),
        ("scheduler.max_num_seqs", 24),
        ("scheduler.max_num_batched_tokens", BUDGET),
        ("cache.num_kv_blocks", 160),
        ("model.max_model_len", 400),
        *settings,
    ]
    return simulate(simulated(EngineConfig.load(None, given)), crowd())


def same_times(ours: RunOutcome, theirs: RunOutcome) -> bool:
    pairs = zip(ours.requests, theirs.requests, strict=True)
    return all(
        list(mine.token_times) == pytest.approx(list(its.token_times), rel=1e-9)
        for mine, its in pairs
    )


@pytest.mark.parametrize(
    ("policy", "options", "theirs"),
    [
        ("chunked_prefill", {"chunk_size": BUDGET}, {}),
        (SHORTEST, {}, {"order": SHORTEST}),
        ("zoo.sjf", {}, {"order": "zoo.sjf"}),
    ],
)
def test_with_the_preset_each_token_comes_when_it_comes_in_vllm(
    policy: str, options: dict[str, object], theirs: dict[str, object]
) -> None:
    vllm = served("vllm", theirs)
    like = served(policy, options, *LIKE["vllm"])
    assert vllm.num_preemptions > 10, "the pool is there to run out"
    assert like.num_preemptions == vllm.num_preemptions
    assert same_times(like, vllm)


@pytest.mark.parametrize("left_out", [name for name, _ in LIKE["vllm"]])
def test_each_setting_of_the_preset_is_needed_for_that(left_out: str) -> None:
    rest = [(name, value) for name, value in LIKE["vllm"] if name != left_out]
    vllm = served("vllm", {"order": LATEST})
    assert same_times(served(LATEST, {}, *LIKE["vllm"]), vllm)
    assert not same_times(served(LATEST, {}, *rest), vllm)


def test_the_preset_of_a_command_line_holds_for_vllms_scheduler_as_well() -> None:
    assert served("vllm", {}, *LIKE["vllm"]).num_preemptions == served("vllm", {}).num_preemptions


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"order": SHORTEST, "policy": "priority"}, "beside policy: priority"),
        ({"order": "chunked_prefill"}, "no order of its own"),
        ({"order": "hrrn"}, "no order of its own"),
        ({"order": "nobody"}, "nobody"),
    ],
)
def test_an_order_that_cannot_sort_the_queue_is_refused(
    options: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        SchedulerHarness(VLLMScheduler, options=options)


def test_last_admitted_is_not_the_victim_of_vllms_priorities() -> None:
    with pytest.raises(ConfigError, match="victim=last_admitted"):
        SchedulerHarness(VLLMScheduler, options={"policy": "priority"}, victim="last_admitted")
