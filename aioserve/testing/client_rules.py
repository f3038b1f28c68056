"""The part of the contract about what clients may say, and about those that are turned away.

Tests for `aioserve.testing.contract`. Knows hints and rejections; what each request gets is checked
by the harness.
"""

from aioserve.testing.hinted import STRANGE, USUAL
from aioserve.testing.subject import USERS, Subject, arrive


class ClientRules:
    """Tests of one policy at one pipeline depth."""

    def test_hints_may_be_missing_extreme_or_of_another_kind(
        self, subject: Subject, pipeline_depth: int
    ) -> None:
        """Each hint of those that tools share, with each kind of value, beside requests without."""
        stated = [(name, value) for name, values in USUAL.items() for value in values]
        stated += [(name, value) for name, values in STRANGE.items() for value in values]
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
