"""The batch that another process plans: the check of each step by counts and KV blocks alone.

Knows limits, which request holds which blocks and what stands in them, kept from step to step, so
that a decode costs a few comparisons. Believes nothing about the scheduler whose steps these are.
"""

from aioserve.config import SchedulerConfig
from aioserve.kv_cache import KVCacheManager
from aioserve.lab.evaluate.enclosure import Failed
from aioserve.request import Request, RequestStatus


def forged(words: str) -> Failed:
    """Return the failure of a policy whose process says what cannot be."""
    return Failed("forged", f"the process of the policy says what cannot be: {words}")


class Stay:
    """One stay of a request in the batch: the KV blocks that it has, and how far it has written."""

    __slots__ = ("block_ids", "is_paused", "num_computed", "request")

    def __init__(self, request: Request, num_computed: int, block_ids: list[int]) -> None:
        self.request = request
        self.num_computed = num_computed
        self.block_ids = block_ids
        self.is_paused = False


class Row:
    """A request, and its place in the batch."""

    __slots__ = ("has_ended", "num_coming", "number", "request", "stay")

    def __init__(self, request: Request, number: int) -> None:
        self.request = request
        self.number = number
        self.has_ended = False
        self.num_coming = 0  # tokens that steps in flight sample
        self.stay: Stay | None = None  # None: it holds no blocks


class Batch:
    """All that hold KV blocks, and what stands in each block. Raises `Failed`."""

    def __init__(
        self,
        settings: SchedulerConfig,
        kv_cache: KVCacheManager,
        max_model_len: int,
        *,
        whole: bool,
    ) -> None:
        self.num_rows = 0
        self.num_held = 0  # blocks that requests hold
        self.num_blocks = kv_cache.pool.num_blocks
        self._size = kv_cache.block_size
        self._is_caching = kv_cache.enable_prefix_caching
        self._budget = settings.step_budget(max_model_len)
        self._max_chunk = settings.max_chunk(max_model_len)
        self._max_num_seqs = settings.max_num_seqs
        self._whole = whole
        self._holders = [0] * self.num_blocks
        #: Of which stay, and its how many-th block, the contents are.
        self._contents: list[tuple[Stay, int] | None] = [None] * self.num_blocks

    def take_out(self, row: Row, *, is_paused: bool) -> None:
        """A request is preempted; one that is paused keeps its blocks."""
        stay, request = row.stay, row.request
        if stay is None or (stay.is_paused and is_paused):
            raise forged(f"it preempts request {row.number}, which does not run")
        if not stay.is_paused:
            self.num_rows -= 1
        if is_paused:
            stay.is_paused = True
            request.status = RequestStatus.PAUSED
            return
        self._release(row, stay)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1

    def leave(self, row: Row) -> None:
        """Remove a request that has ended, with its row and its blocks."""
        if (stay := row.stay) is not None:
            self.num_rows -= not stay.is_paused
            self._release(row, stay)

    def _release(self, row: Row, stay: Stay) -> None:
        holders = self._holders
        for block_id in stay.block_ids:
            holders[block_id] -= 1
            self.num_held -= not holders[block_id]
        row.stay = None

    def step(
        self,
        rows: list[Row],
        tokens: list[int] | None,
        admitted: list[tuple[Row, int, list[int]]],
        grown: dict[Row, list[int]],
    ) -> list[int]:
        """Enter a step; returns how many tokens of each row were computed before it."""
        if tokens is not None and len(tokens) != len(rows):
            raise forged(f"it has {len(rows)} rows, and numbers of tokens for {len(tokens)}")
        total = len(rows) if tokens is None else sum(tokens)
        if total > self._budget:
            raise forged(f"{total} tokens in a step, and {self._budget} may be")
        for row, block_ids in grown.items():
            if row.stay is None or row.stay.is_paused:
                raise forged(f"request {row.number} gets blocks, and is not in the batch")
            self._hand_out(row.stay, block_ids)
        found = [self._enter(row, num_computed, ids) for row, num_computed, ids in admitted]
        if self.num_rows > self._max_num_seqs:
            raise forged(f"{self.num_rows} requests run, and {self._max_num_seqs} may")
        before = []
        size, max_chunk = self._size, self._max_chunk
        for i, row in enumerate(rows):
            stay, count = row.stay, 1 if tokens is None else tokens[i]
            if stay is None or stay.is_paused:
                raise forged(f"request {row.number} runs, and is not in the batch")
            start = stay.num_computed
            end, known = start + count, row.request.num_tokens + row.num_coming
            if not 1 <= count <= max_chunk or end > known or end >= row.request.max_total_tokens:
                raise forged(f"request {row.number} computes {count} tokens behind {start}")
            if end > size * len(stay.block_ids):
                raise forged(f"request {row.number} computes more tokens than it has blocks for")
            if self._whole and count > 1 and end != known:
                raise forged(f"it splits the prompt of request {row.number}")
            before.append(start)
            stay.num_computed = end
            row.num_coming += end == known
        ran = {id(row) for row in rows} if admitted else set()
        for row, num_shared in zip((row for row, _, _ in admitted), found, strict=True):
            if id(row) not in ran:
                raise forged(f"request {row.number} enters the batch, and runs no token")
            if num_shared:
                self._check_shared(row, num_shared)
        return before

    def _enter(self, row: Row, num_computed: int, block_ids: list[int]) -> int:
        """Return how many blocks of a request that enters the batch hold what was computed before,
        and are to be looked at once the step is entered.
        """
        request, stay = row.request, row.stay
        if stay is not None:
            if not stay.is_paused:
                raise forged(f"request {row.number} enters the batch, and is in it")
            held = len(stay.block_ids)
            if block_ids[:held] != stay.block_ids or not 0 <= num_computed <= stay.num_computed:
                raise forged(f"request {row.number} comes back from a pause with other blocks")
            stay.is_paused = False
            stay.num_computed = num_computed
            self._hand_out(stay, block_ids[held:])
            num_shared = 0
        else:
            num_shared, rest = divmod(num_computed, self._size)
            if rest or num_computed < 0 or num_shared > len(block_ids):
                raise forged(f"request {row.number} begins behind {num_computed} tokens")
            if num_shared and not self._is_caching:
                raise forged(f"request {row.number} begins behind a prefix that nothing keeps")
            stay = row.stay = Stay(request, num_computed, [])
            for block_id in block_ids[:num_shared]:
                self._check_id(block_id)
                self.num_held += not self._holders[block_id]
                self._holders[block_id] += 1
            stay.block_ids += block_ids[:num_shared]
            self._hand_out(stay, block_ids[num_shared:])
            if request.status is RequestStatus.WAITING:
                request.num_cached_tokens = num_computed
        request.status = RequestStatus.RUNNING
        self.num_rows += 1
        return num_shared

    def _hand_out(self, stay: Stay, block_ids: list[int]) -> None:
        """Give a request blocks of its own."""
        for block_id in block_ids:
            self._check_id(block_id)
            if self._holders[block_id]:
                raise forged(f"block {block_id} is handed out, and a request holds it")
            self._holders[block_id] = 1
            self.num_held += 1
            self._contents[block_id] = stay, len(stay.block_ids)
            stay.block_ids.append(block_id)

    def _check_id(self, block_id: int) -> None:
        if not 0 <= block_id < self.num_blocks:
            raise forged(f"block {block_id} of {self.num_blocks}")

    def _check_shared(self, row: Row, num_shared: int) -> None:
        """Check that the first blocks of a request hold its own first tokens."""
        stay, mine = row.stay, row.request
        assert stay is not None
        compared: dict[int, int] = {}  # by writer, up to which block
        for i in reversed(range(num_shared)):
            content = self._contents[stay.block_ids[i]]
            end = (i + 1) * self._size
            if content is None or content[1] != i or content[0].num_computed < end:
                raise forged(f"request {row.number} begins behind what was never computed")
            writer = content[0]
            if compared.get(id(writer), -1) >= i:
                continue
            compared[id(writer)] = i
            other = writer.request
            is_same = (other.cache_salt, other.adapter_id) == (mine.cache_salt, mine.adapter_id)
            if not is_same or other.token_ids[:end] != mine.token_ids[:end]:
                raise forged(f"request {row.number} begins behind the prefix of another text")
