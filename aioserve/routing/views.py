"""What a router sees: the request, and each replica as far as the sender knows it.

Frozen data. Knows no transport, no clock and no engine.
"""

import math
from collections.abc import Sequence

import msgspec

from aioserve.hints import PREDICTED_OUTPUT_TOKENS, SLO_CLASS, SLO_TPOT, SLO_TTFT, Hints


class RoutedRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request before a replica has it. Times are seconds of the router's clock."""

    num_tokens: int  # of the prompt
    request_id: str = ""
    max_tokens: int | None = None  # most tokens of the reply that the client allows; None: no limit
    arrival_time: float = 0.0
    deadline: float | None = None  # time at which it ends with a timeout
    user: str = ""  # the client's name, as the request states it; empty: none
    priority: int = 0  # smaller is more urgent
    session: str = ""  # the conversation that it goes on with; empty: none
    adapter: str = ""  # name of its LoRA adapter; empty: none
    hints: Hints = {}  # what the client tells about it, by name
    block_hashes: Sequence[bytes] = ()  # of its full blocks, where the router `uses_prefixes`
    block_size: int = 0  # tokens that a hash stands for
    num_attempts: int = 0  # replicas that had it before, and have died

    @property
    def predicted_tokens(self) -> float | None:
        """Tokens of the reply, as the client predicts it by a hint; None without one."""
        return self._number(PREDICTED_OUTPUT_TOKENS)

    @property
    def slo_class(self) -> str:
        """The class of service levels that the client names by a hint; empty: none."""
        value = self.hints.get(SLO_CLASS)
        return value if isinstance(value, str) else ""

    @property
    def slo_ttft(self) -> float | None:
        """Seconds within which the first token is wanted, by a hint; None: not stated."""
        return self._number(SLO_TTFT)

    @property
    def slo_tpot(self) -> float | None:
        """Seconds within which each further token is wanted, by a hint; None: not stated."""
        return self._number(SLO_TPOT)

    def _number(self, name: str) -> float | None:
        value = self.hints.get(name)
        if isinstance(value, bool | str) or value is None or value <= 0:
            return None
        return value


class ReplicaReport(msgspec.Struct, frozen=True, gc=False):
    """What a replica says of itself. Counts are of requests, unless they name tokens."""

    num_running: int = 0  # the batch: requests that have a seat
    num_waiting: int = 0
    num_waiting_tokens: int = 0  # of those that wait: what is to be computed, unless it is cached
    max_num_seqs: int = 0  # seats: the largest batch
    num_kv_tokens: int = 0  # tokens that its KV cache can hold
    num_free_kv_tokens: int = 0  # of these, held by no request: cached prefixes may be in them
    step_seconds: float = 0.0  # mean of the newest steps, the last ten about; 0: no step yet
    step_base_seconds: float = 0.0  # of a step by the learned line over the batch, without requests
    step_request_seconds: float = 0.0  # that each request of the batch adds, by that line
    num_evictable_kv_tokens: int | None = None  # of the free ones, cached prefixes; None: not known
    adapters: tuple[str, ...] | None = None  # names of those that are loaded; None: not known


#: What a replica of a fleet does; empty: all.
ROLES = ("", "prefill", "decode")


class SentLoad(msgspec.Struct, frozen=True, gc=False):
    """What one sender has sent to a replica and has not ended, or several senders together."""

    work: float = 0.0  # tokens, as `ReplicaView` counts them
    num_requests: int = 0
    num_unstarted_tokens: int = 0  # of prompts without a first token; cached ones left out


class ReplicaView(msgspec.Struct, frozen=True, gc=False):
    """A replica, as far as this sender knows it when the router is asked.

    `work`, `num_sent` and `num_unstarted_tokens` are the sender's own account, which is always
    right, and what other senders have told of theirs, which is as old as their messages. All fields
    after `known_at` are what the replica said then, and are 0 before it has said anything, or if
    the router does not state `uses_reports`.
    """

    name: str  # unique in its fleet; a replica that comes back empty may have it again
    work: float = 0.0  # tokens, of all that was sent and has not ended: prompts until their first
    # token, and half of what is held while a reply is made
    num_sent: int = 0  # requests that were sent and have not ended
    num_unstarted_tokens: int = 0  # of prompts that were sent and have no first token; none cached
    known_at: float = -math.inf  # time at which the rest was true; -inf: nothing is known
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    max_num_seqs: int = 0
    num_kv_tokens: int = 0
    num_free_kv_tokens: int = 0
    step_seconds: float = 0.0
    step_base_seconds: float = 0.0
    step_request_seconds: float = 0.0
    num_evictable_kv_tokens: int | None = None
    adapters: tuple[str, ...] | None = None
    role: str = ""  # one of `ROLES`, by the fleet's settings; always known

    def age(self, now: float) -> float:
        """Seconds since what is reported was so; infinite before the replica has said anything."""
        return now - self.known_at

    def step_seconds_with(self, batch: int) -> float:
        """Seconds that a step of `batch` requests takes by the learned line; the mean of the newest
        steps where the replica reports none; 0 before any step.
        """
        line = self.step_base_seconds + self.step_request_seconds * batch
        return line or self.step_seconds

    @property
    def num_requests(self) -> int:
        """Requests that are there: as the replica reported, and at least those that were sent and
        have not ended.
        """
        return max(self.num_sent, self.num_running + self.num_waiting)


#: Names of the fields of `ReplicaView` that a replica has to report.
REPORTED = frozenset(ReplicaReport.__struct_fields__) | {"known_at"}
