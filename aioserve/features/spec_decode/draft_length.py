"""How many draft tokens pay: as many as give most tokens a second, of all that a step could verify.

A step of D rows gives D tokens in T seconds; with k draft tokens, of which S are expected to be
right, D + S in T(k). So on an idle engine long drafts pay; in a full batch, which computes no token
for nothing, none do; where kernels compute rows in tiles, many may pay where few do not. Knows
chances and times; knows nothing about where drafts come from.
"""

from bisect import bisect, insort
from collections.abc import Hashable, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeVar

K = TypeVar("K", bound=Hashable)

# What is believed of a request before the first of its drafts is verified: a chance, and
# the number of drafts in which it counts as seen. Guesses.
FIRST_CHANCE, FIRST_TRIED = 0.5, 2.0
MEMORY = 0.8  # weight of a verification against the one after it
# Weight of a step, or of a verification of any request's, against the next: half after 34.
STEP_MEMORY = 0.98
# Largest to smallest size of steps from which on their times say what a token costs. A guess.
LEAST_SPREAD = 1.2
# Steps for which what is known of a size counts at least, however old, and at most. Guesses.
LEAST_WEIGHT, MOST_WEIGHT = 4.0, 16.0
PACE_MEMORY = 0.5  # weight of a step's pace against the next. A guess.
MOST_SURPRISE = 2.0  # times what was expected; one stall must not say more of a size. A guess.
FORGETTING = 0.98  # and while its drafts are not sent: they may have become better
LEAST_GAIN = 1.01  # times the tokens a second without drafts: less is not worth the doubt
# After one step fewer than this with drafts, a step goes without. The difference of their times is
# what drafts cost, which changes with the machine's load. A guess.
COMPARED_IN = 32
# Of drafts that do not seem to pay, the first token of one in this many is sent: what is never
# tried is never learned.
TRIAL_INTERVAL = 64
# Of the time of steps, what searches and wrong drafts may cost in all before something is gained.
LOSS_SHARE = 0.005
# What was gained pays for later losses up to this many steps: then a text that no longer repeats
# itself is noticed soon. A guess.
MOST_CREDIT = 4.0
# A loss of more than this many steps counts as this many: drafts rest for at most MOST_DEBT /
# LOSS_SHARE steps, whatever one search or stall took. A guess.
MOST_DEBT = 1.0
# Tokens that agreed before a draft, from which on it is of a higher class: where more agreed, more
# drafts are right.
CLASSES = (6, 12)
MOST_CHANCE = 0.95  # that is believed of a draft before a search: dearer tokens are not worth one
LEAST_BELIEF = 0.5  # in what is known of a class, however much is known of a request


class Record:
    """A record of how often the recent drafts of a request were right."""

    __slots__ = ("belief", "right", "tried")

    def __init__(self) -> None:
        self.right = self.tried = 0.0
        self.belief = FIRST_TRIED  # weight of what was believed before; it fades as well

    def chance(self, first: float) -> float:
        """`first`: of one that was never tried."""
        return (self.right + first * self.belief) / (self.tried + self.belief)

    def note(self, num_drafts: int, num_right: int, memory: float = MEMORY) -> None:
        self.right = memory * self.right + num_right
        self.tried = memory * self.tried + min(num_right + 1, num_drafts)
        self.belief *= memory

    def forget_some(self) -> None:
        self.right *= FORGETTING
        self.tried *= FORGETTING
        self.belief += (1 - FORGETTING) * (FIRST_TRIED - self.belief)


#: A draft that could be sent: the chance of each token after right ones, and their number.
Found = tuple[Record, float, int]


class _Size:
    """The knowledge of steps of about one size: mean tokens, seconds at a pace of 1."""

    def __init__(self, tokens: float, seconds: float, seen: int) -> None:
        self.tokens, self.seconds, self.weight, self.seen = tokens, seconds, 1.0, seen


class StepTimes:
    """Seconds of steps by their number of tokens: a curve, straight between the sizes that were
    seen, and the pace of the machine, by which sizes that were seen at different times compare.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._classes: list[int] = []  # the keys of those, in order
        self._pace = 1.0
        self._num_steps = 0
        self.num_changes = 0  # of the curve, but for the pace
        #: Whether steps of different sizes were seen. If drafts were free until then, they could
        #: fill every step to its limit, and none would ever be seen.
        self.says_price = False
        self._last: int | None = None  # class of the last step; None if it had prompts

    def add(self, num_tokens: int, seconds: float, *, has_prompts: bool = False) -> None:
        """Learn from a step: of the pace after one of its size, of the curve after one of another.
        With prompts texts come and go, which the pace of the step after them shows.
        """
        self._num_steps += 1
        number, last = _class_of(num_tokens), self._last
        self._last = None if has_prompts else number
        if (size := self._sizes.get(number)) is None:
            if self._classes and self._classes[0] < number < self._classes[-1]:
                expected = self.seconds(num_tokens)  # a stall must not pass for it
                seconds = min(max(seconds, expected / MOST_SURPRISE), expected * MOST_SURPRISE)
            self._sizes[number] = _Size(num_tokens, seconds / self._pace, self._num_steps)
            insort(self._classes, number)
            least, most = (self._sizes[self._classes[end]].tokens for end in (0, -1))
            self.says_price = most >= LEAST_SPREAD * least
            self.num_changes += 1
            return
        surprise = seconds / (size.seconds * self._pace)
        surprise = min(max(surprise, 1 / MOST_SURPRISE), MOST_SURPRISE)
        share = 0.0
        if has_prompts or last not in (None, number):
            faded = size.weight * STEP_MEMORY ** (self._num_steps - size.seen)
            size.weight = min(max(faded, LEAST_WEIGHT), MOST_WEIGHT) + 1
            share = 1 / size.weight
            size.tokens += (num_tokens - size.tokens) * share
            size.seconds *= surprise**share
            self.num_changes += 1
        size.seen = self._num_steps
        if not has_prompts:
            self._pace *= surprise ** ((1 - share) * (PACE_MEMORY if last is not None else 1.0))

    def seconds(self, num_tokens: int) -> float:
        """Return seconds that a step of this many tokens takes; 0 if none was seen."""
        if not (classes := self._classes):
            return 0.0
        above = bisect(classes, _class_of(num_tokens))
        if above and self._sizes[classes[above - 1]].tokens > num_tokens:
            above -= 1
        if 0 < above < len(classes):
            left, right = (self._sizes[number] for number in classes[above - 1 : above + 1])
            slope = (right.seconds - left.seconds) / (right.tokens - left.tokens)
        else:  # beyond what was seen
            left, right = self._sizes[classes[0]], self._sizes[classes[-1]]
            rise = max(right.seconds - left.seconds, 0.0) if self.says_price else 0.0
            slope = rise / max(right.tokens - left.tokens, 1.0)
            if not above:  # what a step costs besides its tokens is not below 0
                slope = min(slope, left.seconds / left.tokens)
            left = right if above else left
        return self._pace * (left.seconds + slope * (num_tokens - left.tokens))

    def curve(self, begin: int, end: int) -> list[tuple[float, float]]:
        """Return sizes from `begin` to `end` with their seconds, which do not fall: what a larger
        step took, a smaller one is believed to take. Too low a belief is corrected, as it is tried.
        """
        within = self._classes[bisect(self._classes, _class_of(begin + 1) - 1) :]
        points = [(float(begin), self.seconds(begin))]
        for size in map(self._sizes.__getitem__, within):
            if size.tokens >= end:
                break
            if size.tokens > begin:
                points.append((size.tokens, size.seconds * self._pace))
        points.append((float(end), self.seconds(end)))
        for index in range(len(points) - 2, -1, -1):
            points[index] = points[index][0], min(points[index][1], points[index + 1][1])
        return points


def _class_of(num_tokens: int) -> int:
    """Return the class of a size: 1 to 16 apart, then 8 from a power of two to the next."""
    shift = max((num_tokens - 1).bit_length() - 4, 0)
    return (num_tokens - 1 >> shift) + 8 * shift


class DraftLength:
    """The length of drafts, of what each step cost and how many tokens were right."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        #: By request, what the policy asks for after this step, whether it pays or not.
        self.asked: Mapping[Any, int] = {}
        self._times = StepTimes()
        self._records: dict[Hashable, Record] = {}
        self._num_withheld = 0
        self._num_rows = 1  # of the last step
        self._num_drafts = 0  # tokens that were verified since
        self._num_steps = 0  # in a row that had drafts
        #: Whether the next step has only drafts that are asked for, so that its time is compared.
        self.compares = False
        self._making = 0.0  # seconds that it takes to make a token of a draft
        self._priced = (0, 0, 0.0)  # rows, changes of the curve and making of the price
        #: The least chance that pays, as things stand, if many drafts have it.
        self.price = 0.0

    def stepped(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step is done; the next one may have as many rows."""
        num_rows, seconds = max(num_rows, 1), max(seconds, 1e-6)
        self._settle(num_rows, num_tokens, seconds)
        self._times.add(num_tokens, seconds, has_prompts=num_tokens > num_rows + self._num_drafts)
        self._num_rows = num_rows
        self._num_steps = self._num_steps + 1 if self._num_drafts else 0
        self.compares = self._num_steps % COMPARED_IN == COMPARED_IN - 1
        self._num_drafts = 0
        if (shape := (num_rows, self._times.num_changes, self._making)) != self._priced:
            self._priced, self.price = shape, self._least_price()

    def _settle(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Count what was spent and gained since the last step, before its time is learned."""

    def verified(self, request: Hashable, num_drafts: int, num_right: int) -> None:
        """Record how many draft tokens were sent and accepted."""
        self._num_drafts += num_drafts
        self._record(request).note(num_drafts, num_right)

    def forget_times(self) -> None:
        """Forget measured times: the steps so far were none like those that come."""
        self._times, self.price, self._priced = StepTimes(), 0.0, (0, 0, 0.0)

    def limits(self, requests: Mapping[K, Any]) -> dict[K, int]:
        """Return how many draft tokens of `requests` are worth sending now; of some, none are."""
        asked, max_tokens = self.asked, self.max_tokens
        limits = {r: min(asked[r], max_tokens) for r in requests if r in asked} if asked else {}
        found = {r: self._found(r, its) for r, its in requests.items() if r not in limits}
        limits |= self._paying(found, sum(limits.values()))
        if not self.compares:
            limits |= {r: 1 for r in found if r not in limits and self._is_tried()}
        return limits

    def forget(self, request: Hashable) -> None:
        """Drop the record of a request that has left, or whose id is reused."""
        self._records.pop(request, None)

    def _record(self, request: Hashable) -> Record:
        return self._records.setdefault(request, Record())

    def _first_chance(self) -> float:
        return FIRST_CHANCE

    def _found(self, request: Hashable, known: Any) -> Found:
        record = self._record(request)
        return record, record.chance(self._first_chance()), self.max_tokens

    def _paying(self, found: Mapping[K, Found], num_asked: int) -> dict[K, int]:
        """Return the numbers, above 0, with which most tokens come a second, beside `num_asked`."""
        if not found:
            return {}
        tokens = [(c**n, r) for r, (_, c, most) in found.items() for n in range(1, most + 1)]
        tokens.sort(key=itemgetter(0), reverse=True)
        limits: dict[K, int] = {}
        for _, request in tokens[: self._best_number([chance for chance, _ in tokens], num_asked)]:
            limits[request] = limits.get(request, 0) + 1
        for request, (record, chance, _) in found.items():
            if request not in limits and chance < self.price:
                record.forget_some()
        return limits

    def _best_number(self, chances: Sequence[float], num_asked: int) -> int:
        """Return how many draft tokens are best sent, of those with these falling chances."""
        if not self._times.says_price:  # no step was seen, or none of another size
            return sum(chance >= self.price for chance in chances)
        if self.compares:
            return 0
        begin, right = self._num_rows + num_asked, float(self._num_rows)
        curve = iter(self._times.curve(begin, begin + len(chances)))
        (size, seconds), (above, longer) = next(curve), next(curve)
        best, best_number = LEAST_GAIN * right / seconds, 0
        for number, chance in enumerate(chances, 1):
            while above < begin + number:
                size, seconds, (above, longer) = above, longer, next(curve)
            taken = seconds + (longer - seconds) * (begin + number - size) / (above - size)
            right += chance
            if (rate := right / (taken + number * self._making)) > best:
                best, best_number = rate, number
        return best_number

    def _least_price(self) -> float:
        """Return what a draft token costs at least, in tokens that it would have to gain."""
        if not self._times.says_price:
            return 1.0
        rows = self._num_rows
        (_, without), *more = self._times.curve(rows, rows * (1 + self.max_tokens))
        extra = min((each - without) / (size - rows) for size, each in more if size >= rows + 1)
        return (extra + self._making) * rows / without

    def _is_tried(self) -> bool:
        self._num_withheld += 1
        return not self._num_withheld % TRIAL_INTERVAL


class TextDraftLength(DraftLength):
    """The length of drafts that are found in texts, for which the texts have to be searched.

    Ask `may_look` before a search, then for the `limits` of what was found, and tell what all that
    took. A request has a record for each class of agreement, which begins as that of all requests.
    Drafts that a policy asks for are outside the budget, and say nothing about other requests.
    """

    def __init__(self, max_tokens: int) -> None:
        super().__init__(max_tokens)
        self._by_class = [Record() for _ in range(len(CLASSES) + 1)]
        # By request, the class of its last draft, and whether a policy asked for it.
        self._sent: dict[Hashable, tuple[int, bool]] = {}
        #: Whether drafts that no policy asks for are to be looked for after this step.
        self.is_open = True
        self._num_rests = 0  # steps without a search, as no draft would pay
        self._is_trial = False  # one token is to be tried after this step, though it does not pay
        #: Seconds that may be lost now; below 0, more was lost than may be.
        self._credit = 0.0
        # Since the last step: seconds of searches, and draft tokens that no policy asked for.
        self._spent, self._num_sent, self._num_right = 0.0, 0, 0

    def may_look(self) -> bool:
        """Return whether drafts are to be looked for after this step; `is_open` then says whether
        also for requests for which none are `asked`. To be asked once a step.
        """
        self._is_trial = False
        self.is_open = self._credit >= 0.0 and not self.compares and self._may_pay()
        return self.is_open or any(self.asked.values())

    def looked(self, seconds: float) -> None:
        """Record what a search took for requests for which no drafts are `asked`."""
        self._spent += seconds

    def limits(self, requests: Mapping[K, tuple[int, int]]) -> dict[K, int]:
        """`requests`: by request, tokens of its text that were found again, and of its draft."""
        limits = super().limits(requests)
        for request in limits:
            self._sent[request] = bisect(CLASSES, requests[request][0]), request in self.asked
        return limits

    def _found(self, request: Hashable, known: tuple[int, int]) -> Found:
        own = bisect(CLASSES, known[0])
        record = self._record((request, own))
        chance = record.chance(self._by_class[own].chance(FIRST_CHANCE))
        return record, chance, min(known[1], self.max_tokens)

    def verified(self, request: Hashable, num_drafts: int, num_right: int) -> None:
        self._num_drafts += num_drafts
        found, was_asked = self._sent.get(request, (0, False))
        record = self._record((request, found))
        record.note(num_drafts, num_right)
        record.belief = max(record.belief, LEAST_BELIEF)
        if was_asked:
            return
        self._by_class[found].note(num_drafts, num_right, STEP_MEMORY)
        self._num_sent += num_drafts
        self._num_right += num_right

    def forget(self, request: Hashable) -> None:
        self._sent.pop(request, None)
        for found in range(len(self._by_class)):
            super().forget((request, found))

    def forget_times(self) -> None:
        super().forget_times()
        self._credit, self._spent, self._num_sent, self._num_right = 0.0, 0.0, 0, 0

    def _settle(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        if self._num_sent:
            sizes = (num_tokens, num_tokens - self._num_sent, num_rows)
            whole, without, plain = map(self._times.seconds, sizes)
            whole = min(max(seconds, whole / MOST_SURPRISE), whole * MOST_SURPRISE)
            self._spent += whole - without - plain * self._num_right / num_rows
        credit = self._credit + LOSS_SHARE * seconds - self._spent
        self._credit = max(min(credit, MOST_CREDIT * seconds), -MOST_DEBT * seconds)
        self._spent, self._num_sent, self._num_right = 0.0, 0, 0

    def _is_tried(self) -> bool:
        is_trial, self._is_trial = self._is_trial, False
        return super()._is_tried() or is_trial

    def _may_pay(self) -> bool:
        """Return whether drafts would pay if they were nearly all right; if not, now and then, and
        then one token is tried.
        """
        if self.price < MOST_CHANCE:
            return True
        self._num_rests += 1
        self._is_trial = not self._num_rests % TRIAL_INTERVAL
        return self._is_trial
