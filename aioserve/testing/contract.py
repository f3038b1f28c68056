"""The contract of `SchedulerInterface` as tests that run on any policy.

In a suite of your own:

    class TestMine(PolicyContract):
        policy = MyScheduler
        options = {"chunk_size": 16}

From a command line, without a file: `pytest --aioserve-policy mypkg.mod:MyScheduler`.
"""

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

try:
    import pytest
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "the contract of scheduler policies needs pytest: pip install pytest hypothesis"
    ) from error

from aioserve.errors import EngineOverloadedError
from aioserve.outputs import FinishReason
from aioserve.request import EncoderInput, RequestStatus
from aioserve.scheduler import BaseScheduler, SchedulerInterface
from aioserve.testing.harness import FAILURES, PausesAll, SchedulerHarness, sound_policies
from aioserve.testing.state_machine import (
    DEFAULT_EXAMPLES,
    PATIENT,
    STRANGE,
    USUAL,
    accepted_settings,
    run_machine,
)
from aioserve.testing.story import told
from aioserve.testing.violation import ContractViolation

USERS = ("ann", "bob", "cleo", "dora")  # clients


@dataclass(frozen=True)
class Subject:
    """The policy under test, with its options."""

    policy: type[SchedulerInterface]
    options: Mapping[str, Any] = field(default_factory=dict)
    max_examples: int = DEFAULT_EXAMPLES  # of random traffic
    shrink: bool = True  # look for the shortest way to a violation, for some seconds

    @property
    def kind(self) -> type:
        """The class that a violation blames."""
        return self.policy

    @contextmanager
    def harness(self, **settings: Any) -> Iterator[SchedulerHarness]:
        """A harness around it, with wider limits if it refuses these. An error is told."""
        if self.options:
            settings["options"] = dict(self.options)
        settings = accepted_settings(self.policy, settings)
        with told(SchedulerHarness(self.policy, **settings), simplest=self.shrink) as harness:
            yield harness


def arrive(harness: SchedulerHarness, *args: Any, **settings: Any) -> bool:
    """Add a request, as `SchedulerHarness.add_request`, unless the policy refuses it: whether it
    came in. A policy may refuse any request.
    """
    with suppress(EngineOverloadedError):
        harness.add_request(*args, **settings)
        return True
    return False


def add_traffic(harness: SchedulerHarness, count: int = 6) -> None:
    """Requests of several lengths, users and urgencies; every other one shares a prefix."""
    for i in range(count):
        prompt = [7] * (i % 2 * 9) + [i] * (2 + 3 * i % 7)
        arrive(
            harness,
            f"r{i}",
            prompt,
            max_tokens=4 + 5 * i % 9,
            priority=i % 3,
            user="ab"[i % 2],
            client_index=i % 2,
        )


def add_crowd(harness: SchedulerHarness, count: int) -> None:
    """One request a step or two, more than there is room for: of several clients, urgencies and
    conversations, with long and short prompts and replies.
    """
    for i in range(count):
        arrive(
            harness,
            f"r{i}",
            [i] * (2 + 9 * i % 23),
            max_tokens=4 + 7 * i % 13,
            priority=(5, 1, 6, 3, 5)[i % 5],
            user=USERS[i % len(USERS)],
            hints={"session": f"session-{i % 6}"} | ({"offline": True} if i % 4 == 3 else {}),
        )
        for _ in range(1 + (i % 3 == 2)):
            harness.step()


def converse(harness: SchedulerHarness, max_tokens: int) -> None:
    """Four conversations of four turns, which begin alike and go on; in each turn one of the
    clients leaves half-way, and all replies end before the next.
    """
    for turn in range(4):
        for i in range(4):
            prompt = [*range(10), *[i] * 4 * turn, i]
            arrive(harness, f"r{turn}{i}", prompt, max_tokens=max_tokens)
            harness.step()
        harness.finish(f"r{turn}1")
        harness.run_until_idle()


# The part of the contract about what clients may say, and about those that are turned away. Tests
# for `aioserve.testing.contract`. Knows hints and rejections; what each request gets is checked by
# the harness.


class ClientRules:
    """Tests of one policy at one pipeline depth."""

    def test_hints_may_be_missing_extreme_or_of_another_kind(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """Each hint of those that tools share, with each kind of value, beside requests without."""
        stated = [(name, value) for name, values in USUAL.items() for value in values]
        stated += [(name, value) for name, values in STRANGE.items() for value in values]
        stated += [(name, value) for name, values in PATIENT.items() for value in values]
        with subject.harness(
            pipeline_depth=pipeline_depth, num_blocks=16, max_num_seqs=4, max_model_len=40
        ) as harness:
            for i, (name, value) in enumerate(stated):
                hints = {name: value}
                arrive(
                    harness,
                    f"r{i}",
                    [i % 40] * (2 + 5 * i % 13),
                    max_tokens=1 + i % 4,
                    user=USERS[i % 3],
                    hints=hints,
                )
                if i % 5 == 4:
                    arrive(harness, f"r_plain{i}", [41] * (1 + i % 3), max_tokens=2)
                harness.step()
            harness.run_until_idle()

    def test_offline_requests_get_what_others_leave(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """All of them end: among themselves, and once the requests with a reader have ended."""
        for num_online in (0, 6):
            with subject.harness(
                pipeline_depth=pipeline_depth, num_blocks=16, max_num_seqs=3, max_model_len=40
            ) as harness:
                for i in range(6):
                    hints = {"offline": True}
                    arrive(harness, f"r_off{i}", [i] * (3 + i % 4 * 5), max_tokens=5, hints=hints)
                    if i < num_online:
                        arrive(harness, f"r{i}", [9 + i] * (2 + i % 3 * 4), max_tokens=7)
                    harness.step()
                harness.run_until_idle()

    def test_a_request_that_is_turned_away_may_come_again(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """To an idle engine, with a token of prompt and no hurry: no kind of request is turned away
        for ever, be the policy young or have its models of step times and lengths been fitted.
        """
        with subject.harness(
            pipeline_depth=pipeline_depth,
            num_blocks=24,
            max_num_seqs=3,
            max_num_batched_tokens=7,
            step_seconds=0.01,
        ) as harness:
            for i in range(12):
                hints = {"offline": True} if i % 4 == 2 else {}
                prompt = [i] * (2 + 7 * i % 11 + (50 if i == 0 else 0))  # in pieces: steps to learn
                arrive(harness, f"r{i}", prompt, max_tokens=3, user=USERS[i % 4], hints=hints)
                if i % 3 == 0:
                    harness.run_until_idle()
            harness.run_until_idle()
            harness.ask_again()


# The part of the contract that says what requests get: every token, in every corner, and an end.
# Tests for `aioserve.testing.contract`, which adds what a policy may cost.


END = 2  # the token that ends replies, where a test says how long they are


class PolicyRules:
    """Tests of one policy at one pipeline depth."""

    def test_every_request_ends_with_the_tokens_it_would_get_alone(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """Several lengths, users and urgencies; every other prompt has the same beginning."""
        with subject.harness(pipeline_depth=pipeline_depth) as harness:
            add_traffic(harness)
            harness.run_until_idle()
            check_ends(harness, dict.fromkeys(harness.tokens, FinishReason.LENGTH))

    def test_a_pool_for_exactly_one_request_serves_all(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """21 tokens at most, of which the last needs no slot: 5 blocks of 4."""
        with subject.harness(
            pipeline_depth=pipeline_depth, num_blocks=5, block_size=4, max_model_len=21
        ) as harness:
            for i in range(6):
                arrive(harness, f"r{i}", [i] * (3 * i + 1))
            harness.run_until_idle()

    def test_a_request_that_leaves_at_any_moment_leaves_nothing_behind(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """One of six is aborted, and again with a third, after each number of steps up to 19, with
        a step in flight; then all leave.
        """
        for num_steps in range(20):
            with subject.harness(
                pipeline_depth=pipeline_depth, num_blocks=10, max_num_seqs=3, max_model_len=32
            ) as harness:
                add_traffic(harness)
                for _ in range(num_steps):
                    harness.step()
                if harness.num_in_flight < pipeline_depth:
                    harness.plan()
                harness.finish("r2")
                harness.finish(["r2", "r4", "nobody"], RequestStatus.FINISHED_STOPPED)
                harness.step()
                harness.abort_everything()

    def test_no_plan_tells_how_long_a_reply_will_be(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """The model ends a reply; until then a policy knows only what the client allows."""
        with replace(subject, shrink=False).harness(
            pipeline_depth=pipeline_depth, num_blocks=12, max_num_seqs=2, max_model_len=40
        ) as harness:
            for i in range(4):
                reply = [5] * (2 + 4 * i) + [END]
                arrive(harness, f"r{i}", [9 + i] * 6, reply=reply, eos_token_ids=(END,))
            harness.run_until_idle()
            harness.check_foresees_no_end()

    def test_no_plan_tells_how_long_the_replies_that_run_will_be(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """Two clients have a request each, and come again before it has ended: what a policy makes
        of the first may not depend on its end, which is still to come.
        """
        with replace(subject, shrink=False).harness(
            pipeline_depth=pipeline_depth, max_num_batched_tokens=8
        ) as harness:
            for i in range(4):
                reply = [5] * (8 + 4 * i) + [END]
                user = "ab"[i % 2]
                arrive(harness, f"r{i}", [9 + i] * 6, reply=reply, eos_token_ids=(END,), user=user)
                if i == 1:
                    harness.step()
            harness.run_until_idle()
            harness.check_foresees_no_end()

    def test_a_shared_prefix_is_read_only_when_it_is_there(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """In small pieces, so that prompts are found by others when they are half computed."""
        with subject.harness(
            pipeline_depth=pipeline_depth, long_prefill_token_threshold=3, max_model_len=40
        ) as harness:
            for i in range(8):
                salt = "ab"[i % 3 == 2]
                prompt = [7] * 25 + [i] * (i % 4)
                arrive(harness, f"r{i}", prompt, max_tokens=9, cache_salt=salt)
                harness.step()
            harness.run_until_idle()

    def test_stop_tokens_end_a_request_but_not_before_min_tokens(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """One request ends by EOS, one by a stop token, and one ignores the EOS that it gets."""
        with subject.harness(pipeline_depth=pipeline_depth) as harness:
            any_token = tuple(range(50))
            arrive(harness, "r_eos", [1] * 5, eos_token_ids=any_token)
            arrive(harness, "r_stop", [2] * 5, stop_token_ids=any_token, min_tokens=3)
            arrive(harness, "r_ignored", [3] * 5, eos_token_ids=any_token, ignore_eos=True)
            harness.run_until_idle()
            due = {"r_eos": 1, "r_stop": 4, "r_ignored": 59}
            for name, found in harness.tokens.items():
                is_rejected = harness.finished[name] is FinishReason.REJECTED
                if len(found) != due[name] and not is_rejected:
                    raise ContractViolation(f"{name} got {len(found)} tokens, due are {due[name]}")

    def test_a_deadline_ends_a_request_with_a_timeout(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """One of two requests has a deadline that passes while its reply is generated."""
        with subject.harness(pipeline_depth=pipeline_depth) as harness:
            arrive(harness, "r_late", [1] * 5, deadline=3.5)
            arrive(harness, "r_calm", [2] * 5, max_tokens=9)
            harness.run_until_idle()
            check_ends(harness, {"r_late": FinishReason.TIMEOUT, "r_calm": FinishReason.LENGTH})

    def test_a_queue_timeout_ends_only_requests_never_served(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """Two requests for one seat, with 5 s in which to get it."""
        with subject.harness(
            pipeline_depth=pipeline_depth, max_num_seqs=1, queue_timeout=5.0
        ) as harness:
            for name in ("r1", "r2"):
                arrive(harness, name, [1] * 5, max_tokens=12)
            harness.run_until_idle()
            # Which request has to time out depends on the policy: the harness asks at every step.
            for name, end in harness.finished.items():
                if end is FinishReason.TIMEOUT and harness.tokens[name]:
                    raise ContractViolation(f"{name} was served, and ended with a queue timeout")

    def test_admission_respects_declared_order(self, subject: Subject, pipeline_depth: int) -> None:
        """Too few seats and blocks for all, so that many are preempted; what the policy promises
        with `admits_in_order` is checked at every step.
        """
        for num_seats, num_blocks in ((2, 9), (3, 9), (3, 12), (4, 15)):
            with subject.harness(
                pipeline_depth=pipeline_depth,
                num_blocks=num_blocks,
                max_num_seqs=num_seats,
                max_model_len=36,
                watermark=0,
            ) as harness:
                for i in range(12):
                    arrive(
                        harness,
                        f"r{i}",
                        [i] * (3 + 7 * i % 17),
                        max_tokens=6 + 5 * i % 14,
                        priority=(5, 1, 6, 3, 5)[i % 5],
                        user="abc"[i % 3],
                    )
                    harness.step()
                harness.run_until_idle()

    def test_a_promise_to_keep_decoding_is_kept(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """Long replies, after which competing requests come; with blocks enough, and too few."""
        for num_blocks in (120, 60):
            with subject.harness(
                pipeline_depth=pipeline_depth,
                num_blocks=num_blocks,
                max_num_seqs=4,
                max_model_len=120,
            ) as harness:
                harness.check_keeps_decoding()

    def test_a_request_that_waits_for_an_adapter_slot_gets_it(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """Two places for four adapters, whose requests keep coming; that no step has more is
        checked at every step.
        """
        with subject.harness(pipeline_depth=pipeline_depth, max_loras=2) as harness:
            for i in range(16):
                arrive(harness, f"r{i}", [i] * 9, max_tokens=5, adapter_id=f"a{i % 4}")
                arrive(harness, f"r_none{i}", [i] * 5, max_tokens=3)
                harness.step()
            harness.run_until_idle()

    def test_requests_go_on_when_the_policy_is_switched(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """To every policy that comes with aioserve and back, and from the policy to itself."""
        if not issubclass(subject.policy, BaseScheduler):
            return  # nothing else can be switched
        for num_steps, other in enumerate([*sound_policies(), subject.policy]):
            with subject.harness(
                pipeline_depth=pipeline_depth, num_blocks=12, max_num_seqs=3, max_model_len=32
            ) as harness:
                add_traffic(harness)
                options = subject.options if other is subject.policy else {}
                for successor, its_options in ((other, options), (subject.policy, subject.options)):
                    for _ in range(num_steps % 4):
                        harness.step()
                    for where in FAILURES:
                        harness.fail_switch(where)
                    harness.switch_policy(successor, dict(its_options))
                harness.run_until_idle()

    def test_what_another_policy_has_paused_goes_on(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """It takes over when all requests that ran are paused, with few blocks beside theirs, or
        are in host memory.
        """
        if not issubclass(subject.policy, BaseScheduler):
            return  # nothing else can be switched
        for num_blocks, kv_connector in ((14, "none"), (22, "none"), (14, "memory")):
            with replace(subject, policy=PausesAll, options={}).harness(
                pipeline_depth=pipeline_depth,
                num_blocks=num_blocks,
                kv_connector=kv_connector,
                num_host_slots=40,
                max_num_seqs=3,
                max_num_batched_tokens=80,
                max_model_len=40,
            ) as harness:
                add_traffic(harness, 9)
                for _ in range(2):
                    harness.step()
                while len(harness.steps) % 3:
                    harness.step()
                harness.switch_policy(subject.policy, dict(subject.options))
                harness.run_until_idle()

    def test_blocks_from_outside_are_as_good_as_computed_ones(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """Conversations come again after others took their blocks; one leaves at each moment of
        its loading, one read fails.
        """
        if not issubclass(subject.policy, BaseScheduler):
            return  # nothing else has a connector
        for kind, num_answers in itertools.product(("memory", "disk"), range(4)):
            with subject.harness(
                pipeline_depth=pipeline_depth,
                num_blocks=14,
                max_num_seqs=2,
                max_model_len=40,
                num_host_slots=40,
                kv_connector=kind,
            ) as harness:
                for turn in range(3):
                    for i in range(4):
                        prompt = [i] * 30
                        arrive(harness, f"r{turn}{i}", prompt, max_tokens=3)
                    for answer in range(num_answers):
                        harness.blocks_come(fails=turn + answer == 3)
                    harness.finish(f"r{turn}1")
                    harness.step()
                    harness.finish(f"r{turn}2")
                    harness.run_until_idle()
                stats = harness.connector and harness.connector.stats
                if not harness.turned_away and not (stats and stats.num_hit_tokens):
                    raise ContractViolation("what a connector has was computed again")

    def test_what_a_policy_swaps_comes_back_whole(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """Long replies in a pool for two, with host memory for all; some leave half-way."""
        if not issubclass(subject.policy, BaseScheduler):
            return  # nothing else has a connector
        for num_blocks in (12, 17):
            with subject.harness(
                pipeline_depth=pipeline_depth,
                num_blocks=num_blocks,
                max_num_seqs=3,
                max_model_len=44,
                num_host_slots=120,
                kv_connector="memory",
            ) as harness:
                for i in range(7):
                    arrive(harness, f"r{i}", [i] * (5 + 5 * i % 17), max_tokens=22)
                    harness.step()
                for _ in range(9):
                    harness.step()
                harness.finish(["r1", "r4"])
                harness.run_until_idle()

    def test_images_that_run_whole_are_not_split(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """At all places of prompts, beside others, found in the cache up to the middle."""
        for max_num_batched_tokens in (8, 20, None):
            with subject.harness(
                pipeline_depth=pipeline_depth,
                max_num_seqs=3,
                max_model_len=40,
                max_num_batched_tokens=max_num_batched_tokens,
            ) as harness:
                for i in range(9):
                    image = EncoderInput(1 + i % 5, 6, f"image-{i % 2}", whole=True)
                    prompt = [i % 5] * (9 + i)
                    arrive(harness, f"r{i}", prompt, max_tokens=4, encoder_inputs=(image,))
                    arrive(harness, f"s{i}", [i] * 5, max_tokens=3)
                    harness.step()
                harness.run_until_idle()

    def test_states_are_those_of_the_tokens_before(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """Prefixes in common, texts that go on, with slots for a few states or for one."""
        if not issubclass(subject.policy, BaseScheduler):
            return  # nothing else has slots for them
        for num_state_slots, max_num_batched_tokens in ((1, None), (3, 4), (9, 7), (9, None)):
            with subject.harness(
                **_CONVERSING,
                pipeline_depth=pipeline_depth,
                max_num_batched_tokens=max_num_batched_tokens,
                num_state_slots=num_state_slots,
            ) as harness:
                _converse_with_hits(harness, max_tokens=5, may_hit=num_state_slots > 3)

    def test_windows_hold_what_their_tokens_see(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """Prefixes in common, texts that go on and are thrown out, with room for one and for more;
        what fell out of a window is another's as soon as it may be.
        """
        if not issubclass(subject.policy, BaseScheduler):
            return  # nothing else has blocks for them
        for window, num_spare, max_num_batched_tokens in ((6, 0, 4), (6, 20, 7), (9, 30, None)):
            with subject.harness(
                **_CONVERSING,
                pipeline_depth=pipeline_depth,
                max_num_batched_tokens=max_num_batched_tokens,
                window=window,
                num_spare_window_blocks=num_spare,
            ) as harness:
                _converse_with_hits(harness, max_tokens=9, may_hit=num_spare > 0)


#: What both kinds of room are tried with: three seats, and memory for less than three texts.
_CONVERSING: dict[str, Any] = {"num_blocks": 24, "max_num_seqs": 3, "max_model_len": 40}


def _converse_with_hits(harness: SchedulerHarness, *, max_tokens: int, may_hit: bool) -> None:
    """Conversations with a prefix in common. Raises `ContractViolation` if there was room to keep
    a prefix, and none was found again.
    """
    converse(harness, max_tokens=max_tokens)
    if may_hit and not harness.turned_away and not harness.kv_cache.num_hit_tokens:
        raise ContractViolation("no prefix was found again, though there was room to keep one")


def check_ends(harness: SchedulerHarness, due: Mapping[str, FinishReason]) -> None:
    """Every request that came in has ended, for this reason, or was rejected, which another rule
    judges. Raises `ContractViolation`.
    """
    for name in harness.tokens:
        found, reason = harness.finished[name], due[name]
        if found not in (reason, FinishReason.REJECTED):
            raise ContractViolation(f"{name} ended with {found.value!r}, due was {reason.value!r}")


__all__ = ["PolicyContract", "Subject"]


@pytest.mark.parametrize("pipeline_depth", [1, 2])
class PolicyContract(ClientRules, PolicyRules):
    """Derive a class `Test...` that sets `policy`, and `options` if it needs them."""

    policy: ClassVar[type[SchedulerInterface]]
    options: ClassVar[Mapping[str, Any]] = {}
    max_examples: ClassVar[int] = DEFAULT_EXAMPLES  # of random traffic, at each pipeline depth

    @pytest.fixture
    def subject(self) -> Subject:
        """What is tested; the pytest plugin puts the policies of the command line here."""
        return Subject(self.policy, self.options, self.max_examples)

    # What a policy may cost: others wait with it.

    def test_no_step_wastes_what_requests_hold(self, subject: Subject, pipeline_depth: int) -> None:
        """Too little for all, at small and large budgets: no request is preempted from which none
        gains, and no half prompt sits on its blocks while the step has room, unless it is offline
        work beside online requests.
        """
        for num_tokens, num_seats, num_blocks in ((7, 4, 20), (64, 2, 12), (64, 8, 16)):
            with subject.harness(
                pipeline_depth=pipeline_depth,
                num_blocks=num_blocks,
                max_num_seqs=num_seats,
                max_model_len=40,
                max_num_batched_tokens=num_tokens,
                watermark=0,
                forbids_waste=True,
            ) as harness:
                add_crowd(harness, 14)
                harness.run_until_idle()

    def test_time_and_chance_are_the_policys_own(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """A crowd is served once more, while the clocks, dice and sleep of the process are watched
        for calls of the policy.
        """
        with subject.harness(
            pipeline_depth=pipeline_depth, num_blocks=16, max_num_seqs=3, max_model_len=40
        ) as harness:
            add_crowd(harness, 12)
            harness.run_until_idle()
            harness.check_own_time()

    def test_a_policy_looks_at_what_it_is_given_alone(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """A crowd is served once more, while walks through the objects, frames and tasks of the
        process, where lengths of replies may be, are watched for calls of the policy; nor does its
        code name what leads to frames.
        """
        if pipeline_depth == 1:
            with subject.harness(num_blocks=16, max_num_seqs=3, max_model_len=40) as harness:
                add_crowd(harness, 12)
                harness.run_until_idle()
                harness.check_walks_nowhere()

    def test_schedule_costs_in_proportion_to_the_requests(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """By lines that run and lists that are walked through in C, not by seconds; without steps
        in flight, which change nothing.
        """
        if pipeline_depth == 1:
            with subject.harness() as harness:
                harness.check_cost()

    def test_memory_does_not_grow_with_requests_that_have_ended(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """By bytes behind the policy's attributes, after some requests and after many more, of a
        few clients and of as many clients; without steps in flight, which change nothing.
        """
        if pipeline_depth == 1:
            with subject.harness() as harness:
                harness.check_memory()

    def test_what_is_kept_by_request_id_goes_with_the_request(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """Ids come again, of requests that ended or left; and those of others in their place."""
        if pipeline_depth == 1:
            with subject.harness() as harness:
                harness.check_forgets_ids()

    def test_engines_of_one_process_share_nothing(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """Requests are served, and the containers of the policy's classes and modules compared."""
        if pipeline_depth == 1:
            with subject.harness() as harness:
                harness.check_shares_nothing()

    # What takes long.

    def test_no_rule_is_broken_under_random_traffic(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """Arrivals with every hint, ends, failures, switches and pools at random: the same ones in
        every run.
        """
        run_machine(
            subject.policy,
            subject.options,
            pipeline_depth=pipeline_depth,
            max_examples=subject.max_examples,
            shrink=subject.shrink,
        )

    def test_plans_are_the_same_in_every_process(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """Strings have other hashes in each, and so other places in sets."""
        if pipeline_depth > 1:
            return  # it takes two processes
        with subject.harness(num_blocks=16, max_num_seqs=3, max_model_len=40) as harness:
            for i in range(8):
                arrive(harness, f"r{i}", [i] * (2 + 9 * i % 23), max_tokens=9, user=USERS[i % 4])
            harness.run_until_idle()
            harness.check_hash_order()


class TestGivenPolicies(PolicyContract):
    """The tests that `--aioserve-policy` adds to a pytest run: the plugin fills in `subject`."""
