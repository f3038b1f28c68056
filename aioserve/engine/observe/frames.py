"""What a page that watches the scheduler at work is told: plain data, a few times a second.

Requests go by number, in the order in which they were first told of; times are milliseconds since
the watching began. Knows nothing about what sends the frames, nor what reads them.
"""

from typing import Any

import msgspec

from aioserve.scheduler.registry import OptionField


class Came(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request, when it is first told of."""

    number: int
    shown_id: str  # made of its id, and opens nothing
    user: str
    priority: int
    num_prompt_tokens: int
    max_tokens: int | None  # that it may get; None: until the model's limit
    arrival: float


class Stands(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a request stood when the picture was taken."""

    came: Came
    state: str  # queued, running, preempted, paused
    reason: str  # why it waits; empty: it does not
    num_computed: int
    num_output_tokens: int
    num_cached: int
    num_preemptions: int


class Planned(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A step was planned. Its rows are told as differences from the step before."""

    step_id: int
    time: float
    joined: list[int]  # in this step, and not in the one before
    left: list[int]  # in the one before, and not in this
    tokens: list[tuple[int, int]]  # how many, of those that have more than one
    admitted: list[tuple[int, int]]  # request that enters the batch, its computed tokens
    preempted: list[int]
    num_tokens: int  # in all
    num_running: int  # afterwards
    num_waiting: int
    num_used_blocks: int
    encoded: list[tuple[int, int]]  # request whose images it encodes, their tokens
    paused: list[int]  # they keep their KV blocks


class Back(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A step is back: one token for each request in it, except those that are named."""

    step_id: int
    time: float
    tokens: list[tuple[int, int]]  # how many, of those that did not get one


class Waits(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A waiting request, and why it was not served; told when the reason is another one."""

    number: int
    step_id: int
    reason: str


class Ended(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The end of a request: when, and for which reason."""

    number: int
    time: float
    reason: str  # as the HTTP API has it
    num_output_tokens: int


class Switched(msgspec.Struct, frozen=True, array_like=True):
    """Another policy decides from here on."""

    time: float
    policy: str
    options: dict[str, Any]


class Events(msgspec.Struct, frozen=True, kw_only=True):
    """What happened, in order within each list."""

    came: list[Came]
    planned: list[Planned]
    back: list[Back]
    waits: list[Waits]
    ended: list[Ended]
    switched: list[Switched]


class Lease(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A cached prefix that the policy has pinned for the next turn of a conversation."""

    user: str
    shown_id: str  # made of the conversation's name, and opens nothing
    num_blocks: int  # those that others hold, too, included
    ends: float


class Gauges(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the engine; totals since its start."""

    loop_lag: float  # ms, the worst since the last frame
    num_running: int
    num_waiting: int
    num_used_blocks: int  # that requests or leases hold
    num_leased_blocks: int  # that leases hold, and no request does
    num_leases: int
    leases: list[Lease]  # the newest, some of them if there are many
    num_cached_blocks: int  # held by none, with content that can be found again
    num_free_blocks: int  # without
    num_output_tokens: int
    step_limit: int  # most tokens in a step, as the policy began the last one
    of_policy: dict[str, float]  # what the policy shows of itself, by name
    first_tokens: list[float]  # since the last frame: how long each was waited for, ms
    gaps: list[tuple[float, int]]  # between two deliveries to one request, ms, and how many


class Histograms(msgspec.Struct, frozen=True, kw_only=True):
    """Counts by upper bound, not cumulative, since the start."""

    first_token: list[int]
    gap: list[int]
    whole: list[int]  # from arrival to the end


class Shadow(msgspec.Struct, frozen=True, kw_only=True):
    """The policy that follows in virtual time, beside the live one."""

    policy: str
    bounds: list[float]  # of the histograms, seconds; what is above has a count of its own
    live: Histograms
    shadow: Histograms
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_resets: int
    is_failed: bool


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change from frame to frame."""

    version: str
    model: str
    policy: str
    options: dict[str, Any]
    policies: dict[str, str]  # that are installed, with a line on each
    policy_options: dict[str, list[OptionField]]  # of these, where their sources declare them
    is_simulated: bool  # no model computes: steps take the time of a profile, tokens are invented
    max_num_seqs: int
    num_blocks: int
    block_size: int
    max_model_len: int
    unix_time: float  # when the watching began, seconds


class Frame(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="frame"):
    """What happened since the frame before."""

    number: int
    now: float
    events: Events
    gauges: Gauges
    shadow: Shadow | None = None  # once a second, if there is one


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="snapshot"):
    """How everything stands: the first frame, and the next one for a page that missed a frame."""

    number: int
    now: float
    about: About
    requests: list[Stands]
    rows: list[int]  # of the last step
    gauges: Gauges
    shadow: Shadow | None = None
