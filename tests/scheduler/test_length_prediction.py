"""Predicted lengths: what a client states, else the replies that it had, and nobody's future."""

import random
from statistics import fmean

import msgspec
import pytest
from aioserve.policies.chunked_prefill import ChunkedPrefillScheduler

from aioserve.errors import PolicyError
from aioserve.outputs import FinishReason
from aioserve.params import PoolingParams, SamplingParams
from aioserve.request import Request, RequestSpec
from aioserve.scheduler import BaseScheduler, SchedulerOutput
from aioserve.scheduler.estimates import (
    MAX_GROUPS,
    NEWEST,
    NEWEST_OF_ALL,
    WEIGHT_OF_ALL,
    LengthHistory,
)
from aioserve.testing import SchedulerHarness, cost


class Learning(ChunkedPrefillScheduler):
    """Asks what it learns, and does not act on it."""

    uses_predicted_tokens = True


def scheduler_of(harness: SchedulerHarness) -> BaseScheduler:
    assert isinstance(harness.scheduler, BaseScheduler)
    return harness.scheduler


def predicted(harness: SchedulerHarness, max_tokens: int = 50, **fields: object) -> float:
    """Of a request that comes now, without its coming."""
    spec = RequestSpec("new", [1], SamplingParams(max_tokens=max_tokens))
    request = Request(msgspec.structs.replace(spec, **fields))
    request.bound_length(harness.max_model_len)
    return scheduler_of(harness).predicted_tokens(request, 17.0)


def have_replies(harness: SchedulerHarness, *lengths: int, **fields: object) -> None:
    """Replies of these lengths end, and a step is planned after them."""
    for length in lengths:
        name = f"r{len(harness.requests)}"
        harness.add_request(name, [1, 2], max_tokens=length, **fields)
    harness.run_until_idle()
    harness.schedule()  # which hears of the ends


def test_a_client_s_own_replies_say_how_long_the_next_one_will_be() -> None:
    harness = SchedulerHarness(Learning)
    assert predicted(harness) == 17.0
    have_replies(harness, *[4] * 8, user="short")
    have_replies(harness, *[20] * 8, user="long")
    assert predicted(harness, user="short") < 7
    assert predicted(harness, user="long") > 17
    assert predicted(harness, user="new") == 12


def test_requests_of_one_user_are_told_apart_by_key_class_and_adapter() -> None:
    harness = SchedulerHarness(Learning)
    fields = [
        {"user": "u", "key_name": "one"},
        {"user": "u", "key_name": "two"},
        {"user": "u", "hints": {"slo_class": "batch"}},
        {"user": "u", "adapter_id": "poet"},
    ]
    for i, own in enumerate(fields):
        have_replies(harness, *[2 + 8 * i] * 40, **own)
    for i, own in enumerate(fields):
        assert predicted(harness, **own) == pytest.approx(2 + 8 * i, abs=2)


def test_a_stated_length_counts_and_no_other_kind_of_hint() -> None:
    harness = SchedulerHarness(Learning)
    have_replies(harness, 4, 4)
    assert predicted(harness, hints={"predicted_output_tokens": 31}) == 31
    for nonsense in ("many", True, 0, -3):
        assert predicted(harness, hints={"predicted_output_tokens": nonsense}) == 4


def test_no_prediction_exceeds_what_the_client_allows() -> None:
    harness = SchedulerHarness(Learning)
    assert predicted(harness, max_tokens=5, hints={"predicted_output_tokens": 31}) == 5
    assert predicted(harness, max_tokens=5) == 5


def test_a_running_reply_is_compared_with_those_that_got_as_far() -> None:
    harness = SchedulerHarness(Learning)
    have_replies(harness, 2, 2, 10, 20)
    request = harness.add_request("now", [1], max_tokens=60)
    seen = {}
    while request.num_output_tokens < 28:
        seen[request.num_output_tokens] = scheduler_of(harness).predicted_tokens(request, 17.0)
        harness.step()
    assert seen[0] == fmean([2, 2, 10, 20])
    assert seen[2] == seen[9] == 15
    assert seen[10] == seen[19] == 20
    assert seen[20] == 40  # as much again
    assert seen[27] == 54


def test_replies_that_were_broken_off_and_embeddings_teach_nothing() -> None:
    harness = SchedulerHarness(Learning)
    harness.add_request("left", [1], max_tokens=40)
    harness.add_request("late", [1], max_tokens=40, deadline=5.0)
    harness.add_request("vector", [1, 2], pooling_params=PoolingParams())
    harness.step()
    harness.step()
    harness.finish("left")
    harness.run_until_idle()
    harness.schedule()
    assert harness.finished["late"] is FinishReason.TIMEOUT
    assert predicted(harness) == 17.0
    have_replies(harness, 3)
    assert predicted(harness) == 3


def test_what_was_learned_outlives_a_switch_of_the_policy() -> None:
    harness = SchedulerHarness(Learning)
    have_replies(harness, 5, 5)
    harness.switch_policy(ChunkedPrefillScheduler)
    have_replies(harness, 50)  # nobody learns
    harness.switch_policy(Learning)
    assert predicted(harness) == 5


def test_a_policy_that_does_not_say_that_it_asks_is_told_to() -> None:
    harness = SchedulerHarness(ChunkedPrefillScheduler)
    have_replies(harness, 5)
    assert scheduler_of(harness).book.reply_lengths is None  # what is off learns nothing
    with pytest.raises(PolicyError, match="without uses_predicted_tokens = True"):
        predicted(harness)


def test_the_mean_is_that_of_the_newest_lengths_beyond_what_there_is() -> None:
    rng, history = random.Random(3), LengthHistory()
    lengths: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    everything = []
    for _ in range(800):
        group = rng.choice(list(lengths))
        length = rng.randint(2, 90) // (1 + (group == "b"))
        history.note(group, length)
        lengths[group].append(length)
        everything.append(length)
        so_far = rng.choice([0, 0, 5, 40])
        own = [n for n in lengths[group][-NEWEST:] if n > so_far]
        of_all = [n for n in everything[-NEWEST_OF_ALL:] if n > so_far]
        found = history.expect(group, so_far)
        if not of_all:
            assert found is None or found == fmean(own)
            continue
        assert found == pytest.approx(
            (sum(own) + WEIGHT_OF_ALL * fmean(of_all)) / (len(own) + WEIGHT_OF_ALL)
        )


def test_the_distribution_is_that_of_the_lengths_beyond_what_there_is() -> None:
    rng, history = random.Random(5), LengthHistory()
    lengths: dict[str, list[int]] = {"a": [], "b": []}
    everything: list[int] = []
    for _ in range(400):
        group = rng.choice(list(lengths))
        length = rng.randint(2, 90) // (1 + (group == "b"))
        history.note(group, length)
        lengths[group].append(length)
        everything.append(length)
        so_far, most = rng.choice([0, 5, 40]), rng.choice([60, 500])
        found = history.lengths(group, so_far, most)
        own = [n for n in lengths[group][-NEWEST:] if n > so_far]
        of_all = [n for n in everything[-NEWEST_OF_ALL:] if n > so_far]
        if not own and not of_all:
            assert found is None
            continue
        assert found is not None
        weights = [(min(n, most), 1.0) for n in own]
        weights += [(min(n, most), WEIGHT_OF_ALL / len(of_all)) for n in of_all]
        total = sum(weight for _, weight in weights)
        for ahead in (1, 10, 33, 1000):
            ended = sum(w for n, w in weights if n - so_far <= ahead) / total
            made = sum(w * min(n - so_far, ahead) for n, w in weights) / total
            assert found.chance(ahead) == pytest.approx(ended)
            assert found.expected(ahead) == pytest.approx(made)
        assert found.mean == pytest.approx(sum(n * w for n, w in weights) / total)
        for share in (0.1, 0.5, 0.9, 1.0):
            least = found.quantile(share)
            assert sum(w for n, w in weights if n <= least) >= (share - 1e-9) * total
            assert sum(w for n, w in weights if n < least) < share * total


def test_a_distribution_narrows_while_the_reply_goes_on() -> None:
    harness = SchedulerHarness(Learning)
    have_replies(harness, 2, 2, 10, 20)
    request = harness.add_request("now", [1], max_tokens=60)
    seen = {}
    while request.num_output_tokens < 25:
        lengths = scheduler_of(harness).predicted_lengths(request, 17.0)
        seen[request.num_output_tokens] = (lengths.quantile(0.5), lengths.chance(8), lengths.mean)
        harness.step()
    assert seen[0] == (2, 0.5, 8.5)
    assert seen[2] == (10, 0.5, 15)
    assert seen[10] == (20, 0.0, 20)
    assert seen[12] == (20, 1.0, 20)
    assert seen[20] == (40, 0.0, 40)  # it has outgrown all: as much again


def test_a_stated_length_is_a_distribution_of_one() -> None:
    harness = SchedulerHarness(Learning)
    have_replies(harness, 4, 9)
    spec = RequestSpec("new", [1], SamplingParams(max_tokens=50))
    request = Request(msgspec.structs.replace(spec, hints={"predicted_output_tokens": 31}))
    request.bound_length(harness.max_model_len)
    lengths = scheduler_of(harness).predicted_lengths(request, 17.0)
    assert [lengths.quantile(share) for share in (0.01, 0.5, 1.0)] == [31, 31, 31]
    assert (lengths.chance(30), lengths.chance(31), lengths.mean) == (0.0, 1.0, 31.0)


class Trail(ChunkedPrefillScheduler):
    """Ranks by the tokens to come, which it predicts anew for each running request in each step, as
    TRAIL (ICLR'25) does from the embeddings of the model.
    """

    uses_predicted_tokens = True
    keeps_decoding = False

    def order(self, request: Request) -> float:
        return self.predicted_tokens(request, 50.0) - request.num_output_tokens

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in sorted(self.running, key=self.order):
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()


def test_a_prediction_for_each_request_in_each_step_is_within_the_cost_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cost, "MOST_TIMES", 4.5)
    cost.check_cost(Trail, {})


def test_the_cost_of_a_prediction_does_not_grow_with_what_is_remembered() -> None:
    lines = []
    for count in (10, 5 * NEWEST_OF_ALL):
        history = LengthHistory()
        for i in range(count):
            history.note("group", 1 + 7 * i % 50)
        lines.append(cost.Lines())
        cost.count_lines(lambda known=history: known.expect("group", 3), lines[-1])
    assert lines[0].total() == lines[1].total()


def test_memory_is_bounded_and_the_group_that_was_quiet_longest_is_forgotten() -> None:
    history = LengthHistory()
    for number in range(MAX_GROUPS):
        history.note(number, 10)
    history.note(0, 10)
    for _ in range(200):
        history.note("loud", 900)
    assert len(history) == MAX_GROUPS
    mean = history.expect("stranger")
    assert mean is not None
    assert history.expect(1) == mean  # forgotten
    found = history.expect(0)
    assert found is not None
    assert found < mean
