"""Traffic as plain data: requests, when and for how much. Every configuration gets the same.

Prompts are recipes of a few numbers each; token ids are made when a request arrives, so an hour of
traffic is a few megabytes. Knows nothing about files, policies or clocks. No server knows how long
a reply will be: the model ends it. What a server is told is `max_tokens`, the client's limit, and
a lab that sent the length as the limit would tell every policy the future.
"""

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from itertools import accumulate
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from aioserve.errors import ConfigError, did_you_mean
from aioserve.lab.slo import Slo
from aioserve.request import PROGRAM, SESSION, EncoderInput, Hints

# What befalls the replicas of a fleet while it serves: they die, come back, and become slow.


Place = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]
Duration = Annotated[float, Meta(gt=0)]


class Failure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A replica dies: what it had not streamed goes elsewhere, what it had ends with an error."""

    replica: Place  # from 0
    at: Seconds
    down: Duration | None = None  # seconds until it is back, its cache empty; None: for ever


class Straggler(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A replica's steps take `slowdown` times as long; if it is two at once, times both."""

    replica: Place  # from 0
    slowdown: Duration
    at: Seconds = 0.0
    duration: Duration | None = None  # seconds; None: to the end


class Deploy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rolling restart: replica after replica takes nothing new, ends what it has, restarts with
    an empty cache and serves again before the next one begins.
    """

    at: Seconds
    down: Duration  # seconds from its end until it serves again
    drain: Duration | None = (
        None  # seconds after which it ends although it has requests; None: none
    )
    at_once: Annotated[int, Meta(ge=1)] = 1  # replicas that restart at the same time


class Incidents(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The failures, stragglers and deploys of a workload."""

    failures: tuple[Failure, ...] = ()
    stragglers: tuple[Straggler, ...] = ()
    deploys: tuple[Deploy, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.failures or self.stragglers or self.deploys)

    def __add__(self, other: "Incidents") -> "Incidents":
        return Incidents(
            failures=self.failures + other.failures,
            stragglers=self.stragglers + other.stragglers,
            deploys=self.deploys + other.deploys,
        )

    def moved(self, start: float, time_scale: float = 1.0) -> "Incidents":
        """Return the incidents as a workload tells them that begins at `start`, at another speed.
        What came before is left out. How long something lasts stays as it is: machines do not know
        of our time.
        """
        return Incidents(
            failures=tuple(
                msgspec.structs.replace(failure, at=(failure.at - start) * time_scale)
                for failure in self.failures
                if failure.at >= start
            ),
            stragglers=tuple(
                msgspec.structs.replace(straggler, at=max(straggler.at - start, 0.0) * time_scale)
                for straggler in self.stragglers
                if straggler.duration is None or straggler.at >= start
            ),
            deploys=tuple(
                msgspec.structs.replace(deploy, at=(deploy.at - start) * time_scale)
                for deploy in self.deploys
                if deploy.at >= start
            ),
        )

    def check(self, num_replicas: int) -> None:
        """Raises `ConfigError` if one befalls a replica that there is not, or one that is down."""
        for kind, befallen in (("failure", self.failures), ("straggler", self.stragglers)):
            for incident in befallen:
                if incident.replica >= num_replicas:
                    raise ConfigError(
                        f"a {kind} of replica {incident.replica}, but there are {num_replicas}: "
                        f"they are counted from 0 to {num_replicas - 1}"
                    )
        for deploy in self.deploys:
            if deploy.at_once >= num_replicas:
                raise ConfigError(
                    f"a deploy restarts {deploy.at_once} replicas at once, and there are "
                    f"{num_replicas}: at least one has to serve meanwhile"
                )
        for failure in self.failures:
            for other in self.failures:
                if other is not failure and other.replica == failure.replica:
                    down = float("inf") if failure.down is None else failure.down
                    if failure.at <= other.at < failure.at + down:
                        raise ConfigError(
                            f"replica {other.replica} dies at {other.at:g} s, but it is down since "
                            f"{failure.at:g} s"
                        )


#: What a column of a table of one's own may mean.
COLUMNS = (
    "arrival",  # seconds, or a date
    "arrival_ms",
    "prompt",  # tokens
    "prompt_text",
    "output",
    "output_text",
    "max_tokens",
    "user",
    "priority",
    "timeout",  # seconds
    "class",
    "session",
)


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that a file of traffic does not say of itself."""

    columns: tuple[tuple[str, str], ...] = ()  # of `COLUMNS`, each with its name in the file
    tokenizer: str = ""  # a model whose tokens are counted, or a number: characters per token
    think: float | None = None  # seconds before further turns of a chat; None: only first turns

    @staticmethod
    def parse_columns(text: str) -> tuple[tuple[str, str], ...]:
        """Read `arrival=time,prompt=in_tokens,output=out_tokens`. Raises `ConfigError`."""
        found: dict[str, str] = {}
        for part in text.split(","):
            name, equals, column = part.partition("=")
            if not equals or not column:
                raise ConfigError(f"--columns: expected NAME=COLUMN,..., got {part!r}")
            if name not in COLUMNS:
                raise ConfigError(
                    f"--columns: {name!r} means nothing{did_you_mean(name, COLUMNS)}; there are "
                    f"{', '.join(COLUMNS)}"
                )
            found[name] = column
        for name, other in (("prompt", "prompt_text"), ("output", "output_text")):
            if (name in found) == (other in found):
                raise ConfigError(f"--columns: expected either {name}=COLUMN or {other}=COLUMN")
        return tuple(found.items())


#: Tokens that clients allow where neither the command nor the workload says it. A guess: what
#: clients of chat services commonly ask for, and more than most replies have.
DEFAULT_MAX_TOKENS = 2048


class ReplyLimit(msgspec.Struct, frozen=True):
    """The `max_tokens` of requests: `tokens` for each, or `factor` times the true length of each.

    Where neither is given, a request has what the workload states for it, and one of which the
    workload states nothing has `DEFAULT_MAX_TOKENS`, or the next power of two above the longest
    reply of the workload, if that is more: it is the same for all, so that it tells no length.
    """

    tokens: int | None = None
    factor: float | None = None

    @classmethod
    def parse(cls, text: str) -> "ReplyLimit":
        """Read `512` or `x1.5`. Raises `ConfigError` for anything else."""
        if re.fullmatch(r"[0-9]{1,9}", text) and int(text) > 0:
            return cls(tokens=int(text))
        if re.fullmatch(r"x[0-9]{1,6}(\.[0-9]{1,6})?", text) and float(text[1:]) >= 1:
            return cls(factor=float(text[1:]))
        raise ConfigError(
            "the limit on replies must be a number of tokens such as 2048, or a multiple of each "
            f"reply's own length from x1 on, such as x2; got {text!r}"
        )

    def of(self, output_tokens: int, stated: int | None, default: int) -> int:
        """Return the tokens that a client allows for a reply of `output_tokens`: `stated` is what
        the workload says of it, `default` what holds where nothing else says it.
        """
        if self.tokens is not None:
            return self.tokens
        if self.factor is not None:
            return max(int(self.factor * output_tokens), output_tokens)
        return default if stated is None else stated


def default_max_tokens(longest_reply: int) -> int:
    """Return the limit of clients that state none, from the tokens of the workload's
    longest reply.
    """
    return max(DEFAULT_MAX_TOKENS, 1 << max(longest_reply - 1, 0).bit_length())


# Traffic.


NOISE_LENGTH = 65536  # tokens; prompts are pieces of it
CROWD_STRIDE, MASK = 0x9E3779B97F4A7C15, 2**64 - 1  # from one crowd's names of texts to the next's
FIRST_TOKEN_ID = 16  # tokenizers keep their special tokens below; a live model never sees one


class Piece(NamedTuple):
    """`length` tokens of a text, or of an image, that is named by a number: equal names, equal
    tokens.

    With `reply_of`, the first `length` tokens that the request of that number was answered; what
    is missing, because it was cut short, is filled up with the text named `text`.
    """

    text: int
    length: int
    reply_of: int = -1
    is_image: bool = False


class WorkloadRequest(msgspec.Struct, frozen=True, gc=False):
    """One request, whose reply the model ends after `output_tokens` tokens, the end token included.

    The engine is not told that length: it is told what the client allows, `max_tokens`, if the
    workload states it (None: `Workload.reply_limit` decides). `arrival` is in seconds from the
    start; for one that `follows` another (by its place in the workload) in seconds from that one's
    end: the next turn of a conversation. One that comes `after` others as well waits for the end of
    the last of them all: it joins what a program had fanned out.
    """

    arrival: float
    pieces: tuple[Piece, ...]
    output_tokens: int
    priority: int = 0
    user: str = ""
    timeout: float | None = None
    follows: int = -1
    kind: str = ""  # the class of clients, if the workload has classes
    draft_acceptance: float | None = None  # chance of a guess of its next token; None: not known
    session: int = -1  # the conversation that it is a turn of, by a number of its own; -1: none
    crowd: int = 0  # texts of the same name differ from crowd to crowd
    max_tokens: int | None = None  # what the client allows for the reply, if it is stated
    hints: Hints = {}  # what the client tells the policy
    after: tuple[int, ...] = ()  # places of the others that it waits for beside the one it follows
    adapter: str = ""  # name of the LoRA adapter that it is for; empty: none
    program: int = -1  # that it is a part of, by a number of its own; -1: none
    aborts: bool = False  # its client leaves after the last of the output tokens, and its program

    def __post_init__(self) -> None:
        """Raises `ValueError` for a request that comes after others and follows none."""
        if self.after and self.follows < 0:
            raise ValueError(f"a request comes after {self.after} and follows none")

    @property
    def waits_for(self) -> tuple[int, ...]:
        """Places of the requests whose end it waits for; empty for one that comes by itself."""
        return () if self.follows < 0 else (self.follows, *self.after)

    @property
    def all_hints(self) -> Hints:
        """The hints that the client gives the policy: its own, and its session and program."""
        own = {SESSION: self.session, PROGRAM: self.program}
        numbered: Hints = {n: f"{self.crowd}.{i}" for n, i in own.items() if i >= 0}
        return self.hints if not numbered else {**numbered, **self.hints}

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return sum(piece.length for piece in self.pieces)

    @property
    def num_tokens(self) -> int:
        """Length of prompt and reply together, in tokens."""
        return self.num_prompt_tokens + self.output_tokens


class Workload(msgspec.Struct, frozen=True):
    """Requests that several configurations are compared on."""

    name: str
    requests: tuple[WorkloadRequest, ...]
    seed: int = 0
    is_trace: bool = False  # a trace: another seed changes token ids, but no times or lengths
    weights: dict[str, float] = {}  # of users: what they are due beside each other, if it is stated
    incidents: Incidents = Incidents()  # what befalls the fleet that serves it
    reply_limit: ReplyLimit = ReplyLimit()  # what clients allow for a reply
    classes: dict[str, Slo | None] = {}  # that its file names, with the SLO that it states for each

    @property
    def all_classes(self) -> dict[str, Slo | None]:
        """Classes of the file and of the requests, each with the SLO that is stated for it."""
        return dict.fromkeys((r.kind for r in self.requests if r.kind), None) | self.classes

    @property
    def duration(self) -> float:
        """Seconds from the start to the last arrival that is known in advance."""
        return max((r.arrival for r in self.requests if r.follows < 0), default=0.0)

    @property
    def num_clients(self) -> int | None:
        """The number of clients of a closed loop, which ask again as soon as they are served. Else
        None.
        """
        starts = [r for r in self.requests if r.follows < 0]
        is_closed = self.duration == 0 and len(starts) < len(self.requests)
        return len(starts) if is_closed else None

    @property
    def num_tokens(self) -> int:
        """Prompts and replies of all requests."""
        return sum(request.num_tokens for request in self.requests)

    def max_tokens(self, room: int) -> list[int]:
        """Return the most tokens that the client of each request allows for its reply, of a server
        with `room` tokens for prompt and reply together.
        """
        longest = max((request.output_tokens for request in self.requests), default=0)
        default, limit = default_max_tokens(longest), self.reply_limit
        return [
            max(
                min(limit.of(r.output_tokens, r.max_tokens, default), room - r.num_prompt_tokens), 1
            )
            for r in self.requests
        ]

    @property
    def output_tokens(self) -> dict[str, int]:
        """The true length of each reply in tokens, by the names that a run gives the requests:
        their places. The runner alone may know them.
        """
        return {str(i): request.output_tokens for i, request in enumerate(self.requests)}

    @property
    def draft_acceptance(self) -> dict[str, float]:
        """The chance that a draft token is right, of the requests that state it, by the names that
        a run gives them: their places.
        """
        found = ((str(i), r.draft_acceptance) for i, r in enumerate(self.requests))
        return {name: chance for name, chance in found if chance is not None}

    @property
    def longest(self) -> int:
        """Tokens, prompt and reply, of the longest request."""
        return max((request.num_tokens for request in self.requests), default=0)

    def scaled(self, time_scale: float) -> "Workload":
        """Return the same requests in `time_scale` times the time: 0.5 doubles the rate.

        The pauses before the next turn of a conversation stay: people do not think faster
        because there are more of them.
        """
        if not time_scale > 0:
            raise ConfigError(f"the time scale must be above 0, got {time_scale:g}")
        requests = tuple(
            r if r.follows >= 0 else msgspec.structs.replace(r, arrival=r.arrival * time_scale)
            for r in self.requests
        )
        incidents = self.incidents.moved(0.0, time_scale)
        return msgspec.structs.replace(self, requests=requests, incidents=incidents)

    def cut(
        self, *, start: float = 0.0, duration: float | None = None, limit: int | None = None
    ) -> "Workload":
        """Return the requests that arrive within `duration` seconds after `start`, at most `limit`
        of them. A conversation is in it if its first turn is. Raises `ConfigError` if nothing is
        left.
        """
        end = float("inf") if duration is None else start + duration
        kept: list[WorkloadRequest] = []
        places: dict[int, int] = {}
        for i, request in enumerate(self.requests):
            if limit is not None and len(kept) >= limit:
                break
            is_in = request.follows >= 0 or start <= request.arrival < end
            if is_in and all(place in places for place in request.waits_for):
                places[i] = len(kept)
                kept.append(_moved(request, start, places))
        if not kept:
            raise ConfigError(f"no request of {self.name} is left after cutting")
        incidents = self.incidents.moved(start)
        return msgspec.structs.replace(self, requests=tuple(kept), incidents=incidents)

    def conversations(self, min_turns: int) -> "Workload":
        """Return only the conversations of `min_turns` turns or more. Raises `ConfigError` if none
        is left.
        """
        turns = Counter(r.session for r in self.requests if r.session >= 0)
        kept: list[WorkloadRequest] = []
        places: dict[int, int] = {}
        for i, request in enumerate(self.requests):
            is_in = all(place in places for place in request.waits_for)
            if is_in and turns[request.session] >= min_turns:
                places[i] = len(kept)
                kept.append(_moved(request, 0.0, places))
        if not kept:
            raise ConfigError(f"{self.name} has no conversation of {min_turns} turns")
        return msgspec.structs.replace(self, requests=tuple(kept))

    def times(self, num_copies: int) -> "Workload":
        """`num_copies` such crowds of clients at once, with texts and conversations of their own;
        the times of each are moved on by a share of the duration, and what then is behind the end
        comes at the beginning.
        """
        duration, size = self.duration, len(self.requests)
        found = [
            _copied(request, crowd, crowd * size, duration * crowd / num_copies, duration)
            for crowd in range(num_copies)
            for request in self.requests
        ]
        return msgspec.structs.replace(self, requests=tuple(found))

    def clipped(self, max_model_len: int) -> tuple["Workload", int]:
        """Return requests shortened to the limit, prompts first; and how many were."""
        requests = [_clip(r, max_model_len) for r in self.requests]
        num_clipped = sum(a is not b for a, b in zip(requests, self.requests, strict=True))
        return msgspec.structs.replace(self, requests=tuple(requests)), num_clipped

    @property
    def largest_image(self) -> int:
        """The size of the largest image, in tokens; 0 if there is none."""
        return max((p.length for r in self.requests for p in r.pieces if p.is_image), default=0)

    def refuse_images(self, why: str) -> None:
        """Raises `ConfigError` if there are any."""
        if self.largest_image:
            raise ConfigError(f"{self.name}: it has images, and {why}")

    def check_fits(self, max_model_len: int, why: str = "max_model_len") -> None:
        """Raises `ConfigError` that names the first request longer than `max_model_len`."""
        too_long = [i for i, r in enumerate(self.requests) if r.num_tokens > max_model_len]
        if too_long:
            first = self.requests[too_long[0]]
            raise ConfigError(
                f"{self.name}: {len(too_long)} of {len(self.requests)} requests can never run; "
                f"the first is request {too_long[0]} with {first.num_prompt_tokens} prompt + "
                f"{first.output_tokens} output = {first.num_tokens} tokens, but {why} allows "
                f"{max_model_len} (--clip shortens them)"
            )


def build_prompt(
    request: WorkloadRequest, vocab_size: int, replies: dict[int, list[int]]
) -> list[int]:
    """Token ids of a prompt; `replies` holds the replies to the requests that others follow."""
    token_ids: list[int] = []
    for piece in request.pieces:
        length = piece.length
        if piece.reply_of >= 0:
            reply = replies.get(piece.reply_of, [])[:length]
            token_ids += reply
            length -= len(reply)
        text = (piece.text + CROWD_STRIDE * request.crowd) & MASK
        tokens = text_tokens(text, length, vocab_size)
        if token_ids:
            token_ids += tokens
        else:
            token_ids = tokens
    return token_ids


def build_images(request: WorkloadRequest) -> list[EncoderInput]:
    """Return the places of images in such a prompt."""
    ends = accumulate(piece.length for piece in request.pieces)
    return [
        EncoderInput(end - piece.length, piece.length, f"{request.crowd}-{piece.text:x}")
        for piece, end in zip(request.pieces, ends, strict=True)
        if piece.is_image
    ]


def text_tokens(text: int, length: int, vocab_size: int) -> list[int]:
    """Return the first tokens of the text of this name. Any two texts differ from their first
    tokens on.

    A piece of one long noise, after a few tokens that say the name: as good as noise of its own,
    and an hour of traffic has 20 million tokens.
    """
    low = FIRST_TOKEN_ID if vocab_size > 2 * FIRST_TOKEN_ID else 0
    size = vocab_size - low
    bits = int.from_bytes(blake2b(text.to_bytes(8, "little"), digest_size=10).digest(), "little")
    start, bits = bits % NOISE_LENGTH, bits // NOISE_LENGTH
    name = [
        low + bits % size,
        low + (bits >> 16) % size,
        low + (bits >> 32) % size,
        low + (bits >> 48) % size,
    ]
    noise = _noise(low, vocab_size)
    if start >= 4 and start - 4 + length <= NOISE_LENGTH:  # most: a copy less
        ids = noise[start - 4 : start - 4 + length]
        ids[:4] = name[:length]
        return ids
    ids = name + noise[start : start + length]
    while len(ids) < length:
        ids += noise
    del ids[length:]
    return ids


@cache
def _noise(low: int, high: int) -> list[int]:
    """Token ids from `low` on and below `high`. Equal ones are one object."""
    ids = np.random.default_rng(0).integers(low, high, NOISE_LENGTH)
    noise: list[int] = np.arange(high).astype(object)[ids].tolist()
    return noise


def text_name(*parts: int | str) -> int:
    """Return a 64-bit name for a text from what identifies it."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def followers(requests: Sequence[WorkloadRequest]) -> dict[int, list[int]]:
    """Return the requests that wait for the end of each request, by its place."""
    found: dict[int, list[int]] = {}
    for i, request in enumerate(requests):
        for place in request.waits_for:
            found.setdefault(place, []).append(i)
    return found


def replied_to(requests: Sequence[WorkloadRequest]) -> set[int]:
    """Return requests whose replies are part of later prompts."""
    return {piece.reply_of for r in requests if r.follows >= 0 for piece in r.pieces} - {-1}


def _moved(request: WorkloadRequest, start: float, places: dict[int, int]) -> WorkloadRequest:
    """Return the request in a workload that begins at `start`, its references by the new
    `places`.
    """
    if request.follows < 0:
        return msgspec.structs.replace(request, arrival=request.arrival - start)
    pieces = tuple(
        piece if piece.reply_of < 0 else piece._replace(reply_of=places[piece.reply_of])
        for piece in request.pieces
    )
    return msgspec.structs.replace(
        request,
        pieces=pieces,
        follows=places[request.follows],
        after=tuple(places[place] for place in request.after),
    )


def _copied(
    request: WorkloadRequest, crowd: int, offset: int, seconds: float, duration: float
) -> WorkloadRequest:
    """Return a request in another crowd, whose requests stand `offset` places behind, and come
    `seconds` later.
    """
    arrival, follows, pieces = request.arrival, request.follows, request.pieces
    if follows >= 0:
        follows += offset
    elif arrival + seconds > duration:
        arrival += seconds - duration
    else:
        arrival += seconds
    if any(piece.reply_of >= 0 for piece in pieces):
        pieces = tuple(
            piece if piece.reply_of < 0 else piece._replace(reply_of=piece.reply_of + offset)
            for piece in pieces
        )
    after = tuple(place + offset for place in request.after)
    return msgspec.structs.replace(
        request, arrival=arrival, follows=follows, after=after, pieces=pieces, crowd=crowd
    )


def _clip(request: WorkloadRequest, max_model_len: int) -> WorkloadRequest:
    if request.num_tokens <= max_model_len:
        return request
    output_tokens = min(request.output_tokens, max_model_len - 1)
    room = max_model_len - output_tokens
    pieces: list[Piece] = []
    for piece in request.pieces:
        if room > 0:
            is_image = piece.is_image and piece.length <= room
            pieces.append(piece._replace(length=min(piece.length, room), is_image=is_image))
            room -= pieces[-1].length
    return msgspec.structs.replace(request, pieces=tuple(pieces), output_tokens=output_tokens)
