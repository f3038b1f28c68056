"""The part of the contract that says what requests get: every token, in every corner, and an end.

Tests for `aioserve.testing.contract`, which adds what a policy may cost.
"""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aioserve.outputs import FinishReason
from aioserve.request import EncoderInput, RequestStatus
from aioserve.scheduler import BaseScheduler
from aioserve.testing.harness import SchedulerHarness
from aioserve.testing.subject import Subject, add_traffic, arrive, converse
from aioserve.testing.successors import FAILURES, PausesAll, sound_policies
from aioserve.testing.violation import ContractViolation

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
