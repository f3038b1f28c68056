"""The policy under test, and requests for it, as the tests of the contract use them.

Knows how a harness is made for a policy. Knows nothing about rules.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from aioserve.errors import EngineOverloadedError
from aioserve.scheduler import SchedulerInterface
from aioserve.testing.harness import SchedulerHarness
from aioserve.testing.state_machine import DEFAULT_EXAMPLES, accepted_settings
from aioserve.testing.story import told

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
