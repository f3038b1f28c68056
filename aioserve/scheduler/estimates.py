"""What a policy can ask about the future: step times, prices of preemption, peaks, reply lengths.

`OnlineStepTime` learns what a step costs from the steps that came back: a linear model, `base +
prefill tokens + decodes + context read`, fitted by recursive least squares that forgets. Plain
Python: about 15 microseconds a step. Errors are taken relative to the step, so one slow outlier
moves it little. `RecomputePrice` says what preempting costs, `PeakMemory` how much KV memory
requests will hold at most (LightLLM's rule, its `_can_add_new_req`, which S-LoRA took over, and the
test inside of Past-Future and MC-SF), `LengthHistory` how long replies of a kind were lately
and, as `PredictedLengths`, how they were distributed.
"""

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from itertools import accumulate, islice
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING

from aioserve.request import PREDICTED_OUTPUT_TOKENS, Request, hinted_number
from aioserve.scheduler.output import SchedulerOutput, count_tokens

if TYPE_CHECKING:
    from aioserve.kv_cache import KVCacheManager

# A step, 1,000 prefill tokens, 100 decodes, 100,000 tokens of context: units in which the four
# coefficients are of one size.
UNITS = (1.0, 1e-3, 1e-2, 1e-5)
# Seconds for each of these until something is known. A guess: a small model on a few cores.
FIRST_GUESS = (0.005, 0.05, 0.01, 0.005)
DOUBT = 10.0  # how wrong the guess may be, as a factor
NOISE = 0.1  # how much equal steps vary, as a share
MEMORY = 0.97  # weight of a step against the one after it: half after 23 steps
LASTING_DOUBT = 0.3  # the most that forgetting brings back, as a share
MAX_ERROR = 5 * NOISE  # beyond it a step counts as an accident, once the first are learned from
NUM_FIRST_STEPS = 32
MIN_PROMPT_STEPS = 8  # with fewer, the price of a prompt token is still the guess

Vector = tuple[float, float, float, float]


class OnlineStepTime:
    """Tell it of each step when it is `planned` and when it has `returned`; ask for `seconds`."""

    def __init__(self) -> None:
        self.num_steps = 0  # steps learned from so far
        self.num_prompt_steps = 0  # steps learned from that had prompt tokens
        self.last_seconds = 0.0  # what the last step took; 0 if its plan was not seen
        self._coefficients = list(FIRST_GUESS)
        self._covariance = [
            [(DOUBT * guess / NOISE) ** 2 if i == j else 0.0 for j in range(4)]
            for i, guess in enumerate(FIRST_GUESS)
        ]
        self._planned: deque[tuple[int, float, Vector]] = deque()  # not back yet
        self._last_returned = 0.0

    @property
    def is_fitted(self) -> bool:
        """Whether enough prompts were seen to trust the price of a prompt token."""
        return self.num_prompt_steps >= MIN_PROMPT_STEPS

    @property
    def seconds_per_step(self) -> float:
        """Seconds that a step costs before it computes anything."""
        return max(self._coefficients[0], 1e-6)

    @property
    def seconds_per_prompt_token(self) -> float:
        """What one more prompt token costs, its reading included."""
        _, prefill, _, context = self._coefficients
        return max(prefill * UNITS[1] + context * UNITS[3], 1e-9)

    def planned(self, output: SchedulerOutput, now: float) -> None:
        """Record the plan of a step, to learn from its time."""
        if output.total_num_scheduled_tokens:
            self._planned.append((output.step_id, now, _features(output)))

    def returned(self, output: SchedulerOutput, now: float) -> None:
        """Learn from a step that is back."""
        while self._planned and self._planned[0][0] < output.step_id:
            self._planned.popleft()  # discarded: it never comes back
        self.last_seconds = 0.0
        if not self._planned:
            return
        _, planned, features = self._planned.popleft()
        # With two steps in flight, this one began when the one before it ended.
        self.last_seconds = now - max(planned, self._last_returned)
        self._last_returned = now
        if self.last_seconds > 0:
            self._learn(features, self.last_seconds)

    def seconds(self, num_prefill_tokens: int, num_decodes: int, num_context_tokens: int) -> float:
        """Predicted time of a step. `num_context_tokens` are all that are read, new ones too."""
        features = _scale(num_prefill_tokens, num_decodes, num_context_tokens)
        return max(_dot(self._coefficients, features), 1e-6)

    def seconds_of(self, output: SchedulerOutput) -> float:
        """Predicted time of a planned step."""
        return max(_dot(self._coefficients, _features(output)), 1e-6)

    def max_prefill_tokens(self, seconds: float, num_decodes: int, num_context_tokens: int) -> int:
        """Return the most prompt tokens that fit into a step of `seconds` beside `num_decodes`
        decodes, of which the policy says how many tokens they read: `num_context_tokens`, the sum
        of their `num_computed_tokens`. Negative if the decodes alone take longer.
        """
        left = seconds - self.seconds(0, num_decodes, num_context_tokens)
        return int(left / self.seconds_per_prompt_token)

    def _learn(self, features: Vector, seconds: float) -> None:
        """One step of recursive least squares on features / seconds, whose target is 1."""
        self.num_steps += 1
        self.num_prompt_steps += features[1] > 0
        x = [feature / seconds for feature in features]
        covariance = self._covariance
        spread = [_dot(row, x) for row in covariance]
        gain = [s / (1.0 + _dot(spread, x)) for s in spread]
        error = 1.0 - _dot(self._coefficients, x)
        if self.num_steps > NUM_FIRST_STEPS:
            error = min(max(error, -MAX_ERROR), MAX_ERROR)
        self._coefficients = [c + g * error for c, g in zip(self._coefficients, gain, strict=True)]
        # Forget, but only so much: a coefficient that no step tells anything about (prompts, in a
        # long decode) must not become a toy of the noise.
        forget = [
            MEMORY**-0.5 if covariance[i][i] < _most_variance(c, FIRST_GUESS[i]) else 1.0
            for i, c in enumerate(self._coefficients)
        ]
        for i in range(4):
            for j in range(i + 1):  # both halves from one sum, or rounding errors grow apart
                rest = covariance[i][j] - gain[i] * spread[j]
                covariance[i][j] = covariance[j][i] = forget[i] * forget[j] * rest


def _most_variance(coefficient: float, guess: float) -> float:
    return (LASTING_DOUBT * max(abs(coefficient), 0.01 * guess) / NOISE) ** 2


def _features(output: SchedulerOutput) -> Vector:
    return _scale(*count_tokens(output))


def _scale(num_prefill_tokens: int, num_decodes: int, num_context_tokens: int) -> Vector:
    _, prefill, decode, context = UNITS
    return (1.0, prefill * num_prefill_tokens, decode * num_decodes, context * num_context_tokens)


def _dot(a: list[float], b: list[float] | Vector) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3]


class RecomputePrice:
    """The number of tokens that preempted requests would compute again: prices of one moment, for
    policies that displace. A preempted request finds its blocks again only if no other request has
    taken them: it is assumed that all that wait come in before the preempted request does, and that
    those that run grow to twice their length. What there is to be gained, the policy knows.

    Blocks that other requests hold as well cost nothing, and no block costs anything if there is
    room for all of that beside it.
    """

    def __init__(
        self, kv_cache: "KVCacheManager", running: Iterable[Request], num_waiting_tokens: int
    ) -> None:
        self._block_size = kv_cache.block_size
        self._ref_counts = kv_cache.pool.ref_counts
        num_wanted = num_waiting_tokens + sum(request.num_tokens for request in running)
        #: Tokens for which there will be no room, if no request is preempted.
        self.num_lacking = num_wanted - kv_cache.pool.num_free_blocks * kv_cache.block_size

    def num_tokens(self, request: Request) -> int:
        """Return how many of its computed tokens the running request would compute again."""
        num_computed = request.num_computed_tokens
        if num_computed + self.num_lacking <= 0:
            return 0
        counts = self._ref_counts  # what requests share are beginnings
        num_shared = bisect_left(request.block_ids, True, key=lambda b: counts[b] == 1)
        num_own = max(num_computed - num_shared * self._block_size, 0)
        return min(num_own, max(num_own + self.num_lacking, 0))


class PeakMemory:
    """The peak of KV tokens that some requests hold together, as one after the other ends.

    Every request gets a token a step until its final length, so when the k requests with the most
    tokens to go are left, each of them has grown by what the last of the k has to go. The peak is
    the largest of these k sums. Shared prefixes count once for each request.

    `PeakMemory(running, total)`: `total`, a function of a request, says how many tokens it will
    have at its end, prompt and reply together: its limit, if no function is given. A request that
    has as many already counts as it is.
    """

    def __init__(
        self,
        requests: Iterable[Request] = (),
        total: Callable[[Request], float] = attrgetter("max_total_tokens"),
    ) -> None:
        self._total = total
        #: (tokens to go, negative; tokens now) of each request: the most to go first.
        self._rows = sorted(map(self._row, requests))

    def __len__(self) -> int:
        """Return the number of requests that count as running."""
        return len(self._rows)

    def add(self, request: Request) -> None:
        """Count `request` as one that runs."""
        insort(self._rows, self._row(request))

    def with_request(self, request: Request) -> int:
        """Return the peak in tokens if `request` ran as well."""
        rows = self._rows.copy()
        insort(rows, self._row(request))
        return _peak(rows)

    def num_fitting(self, requests: Iterable[Request], capacity: float) -> int:
        """Return how many of `requests`, in order, may run as well until the peak in tokens is more
        than `capacity`. Doubles the number until it is too many, then halves what is left: O(log k)
        peaks for k that fit, where one `with_request` after the other takes k.
        """
        source, rows, num_fitting = iter(requests), list[tuple[int, int]](), 0
        while more := [self._row(request) for request in islice(source, len(rows) + 1)]:
            rows += more
            if _peak(sorted(self._rows + rows)) > capacity:
                counts = range(num_fitting + 1, len(rows))
                return num_fitting + bisect_left(
                    counts, x=True, key=lambda n: _peak(sorted(self._rows + rows[:n])) > capacity
                )
            num_fitting = len(rows)
        return num_fitting

    @property
    def peak(self) -> int:
        """The peak in tokens; 0 if nothing runs."""
        return _peak(self._rows)

    def _row(self, request: Request) -> tuple[int, int]:
        """Return a request that has not run yet holds its prompt and the token that its step
        samples.
        """
        to_go = max(int(self._total(request)) - request.num_tokens - 1, 0)
        return -to_go, request.num_tokens + (request.num_output_tokens == 0)


def _peak(rows: list[tuple[int, int]]) -> int:
    peak = held = 0
    for count, (minus_to_go, num_tokens) in enumerate(rows, start=1):
        held += num_tokens
        peak = max(peak, held - count * minus_to_go)
    return peak


MAX_GROUPS = 4096  # the one of which nothing was heard for longest is forgotten first
NEWEST = 64  # lengths of a group that count
NEWEST_OF_ALL = 256  # lengths that count of all groups together
# Lengths of a group that weigh as much as all that is known of all groups. A guess.
WEIGHT_OF_ALL = 4.0


class _Newest:
    """The newest lengths of a group: how many are above a number, and their sum, by bisection."""

    __slots__ = ("_arrived", "_sums", "lengths")

    def __init__(self, count: int) -> None:
        self._arrived: deque[int] = deque(maxlen=count)
        self.lengths: list[int] = []  # sorted
        self._sums: list[int] | None = [0]  # of the first 0, 1, 2, ...; None: one has come since

    def add(self, length: int) -> None:
        if len(self._arrived) == self._arrived.maxlen:
            del self.lengths[bisect_left(self.lengths, self._arrived[0])]
        self._arrived.append(length)
        insort(self.lengths, length)
        self._sums = None

    def between(self, low: float, high: float = inf) -> tuple[int, int]:
        """Return number and sum of the lengths above `low` and up to `high`."""
        if self._sums is None:
            self._sums = [0, *accumulate(self.lengths)]
        first, last = bisect_right(self.lengths, low), bisect_right(self.lengths, high)
        return max(last - first, 0), max(self._sums[last] - self._sums[first], 0)


class LengthHistory:
    """Lengths in tokens of replies that have ended, by group: what is expected of the next one.

    Bounded: the newest lengths of the groups that were heard of last.
    """

    def __init__(self) -> None:
        self._all = _Newest(NEWEST_OF_ALL)
        self._groups: OrderedDict[Hashable, _Newest] = OrderedDict()

    def __len__(self) -> int:
        """Return number of groups that are known."""
        return len(self._groups)

    def note(self, group: Hashable, length: int) -> None:
        """A reply of the group has ended after `length` tokens."""
        if (own := self._groups.get(group)) is None:
            own = self._groups[group] = _Newest(NEWEST)
            if len(self._groups) > MAX_GROUPS:
                self._groups.popitem(last=False)
        self._groups.move_to_end(group)
        own.add(length)
        self._all.add(length)

    def expect(self, group: Hashable, so_far: int = 0) -> float | None:
        """Return the mean length of replies that got beyond `so_far` tokens: of the group's, drawn
        towards that of all groups while there are few. None if none got there.
        """
        count, total = self._all.between(so_far)
        own = self._groups.get(group)
        own_count, own_total = (0, 0) if own is None else own.between(so_far)
        if not count:
            return own_total / own_count if own_count else None
        return (own_total + WEIGHT_OF_ALL * total / count) / (own_count + WEIGHT_OF_ALL)

    def lengths(self, group: Hashable, so_far: int, most: int) -> "PredictedLengths | None":
        """Return the distribution whose mean `expect` returns, up to `most` tokens, with the same
        weights. None if no reply got beyond `so_far` tokens.
        """
        found = []
        if (own := self._groups.get(group)) is not None and own.between(so_far)[0]:
            found.append((own, 1.0))
        if count := self._all.between(so_far)[0]:
            found.append((self._all, WEIGHT_OF_ALL / count))
        return PredictedLengths(found, so_far, most) if found else None


class PredictedLengths:
    """The distribution of a reply's length in all, in tokens, once it has `so_far` tokens: that of
    the replies that got beyond as many. Holds until the next reply ends; each question costs
    O(log n) of n lengths, and a quantile the square of that.
    """

    def __init__(self, samples: list[tuple[_Newest, float]], so_far: int, most: int) -> None:
        """`samples` are lengths with the weight of each; `most` is what the request may have."""
        self.so_far = so_far  # tokens that the reply has
        self.most = max(most, so_far)  # tokens that the reply may have
        self._samples = samples
        self._total = sum(weight * sample.between(so_far)[0] for sample, weight in samples)

    @classmethod
    def of(
        cls, request: Request, told: float, history: LengthHistory | None, group: Hashable
    ) -> "PredictedLengths":
        """Return what is known of a request's reply: by the history of its group, unless the client
        states a length or no reply got as far; then `told` is its one length.
        """
        so_far = request.num_output_tokens
        most = request.max_total_tokens - request.num_prompt_tokens
        if history is not None and hinted_number(request, PREDICTED_OUTPUT_TOKENS, 0.0) <= 0:
            if (found := history.lengths(group, so_far, most)) is not None:
                return found
        one = _Newest(1)
        one.add(max(round(told), so_far + 1))
        return cls([(one, 1.0)], so_far, most)

    @property
    def mean(self) -> float:
        """The expected length of the reply, in tokens."""
        return self.so_far + self.expected(self.most - self.so_far)

    def chance(self, num_tokens: float) -> float:
        """Return the probability that the reply ends within its next `num_tokens` tokens."""
        end = self.so_far + num_tokens
        if end >= self.most:
            return 1.0
        found = sum(w * sample.between(self.so_far, end)[0] for sample, w in self._samples)
        return min(found / self._total, 1.0)

    def expected(self, num_tokens: float) -> float:
        """Return how many of its next `num_tokens` tokens the reply is expected to have: fewer than
        all, because it may end before. `chance` divided by this is the hazard: the rate of ends per
        token over these tokens, whose maximum over `num_tokens` is the Gittins index.
        """
        so_far, num_tokens = self.so_far, max(min(num_tokens, self.most - self.so_far), 0)
        end, found = so_far + num_tokens, 0.0
        for sample, weight in self._samples:
            count, total = sample.between(so_far, end)
            found += weight * (total - so_far * count + num_tokens * sample.between(end)[0])
        return found / self._total

    def quantile(self, share: float) -> int:
        """Return the smallest number of tokens in all at which at least this share of such replies
        has ended; `share` is from 0 to 1.
        """
        return bisect_left(
            range(self.so_far + 1, self.most),
            min(share, 1.0) - 1e-12,
            key=lambda end: self.chance(end - self.so_far),
        ) + min(self.so_far + 1, self.most)
