"""How a policy ranks what requests leave in the KV cache: `retention`, and `retain` later on.

Asks the policy and checks its answers. Which block is evicted first, `Ranking` knows.
"""

from collections.abc import Callable

from aioserve.errors import PolicyError
from aioserve.kv_cache import Retention
from aioserve.request import Request
from aioserve.scheduler.blame import asking
from aioserve.scheduler.lease_verbs import Leasing


class Retaining(Leasing):
    """A scheduler whose policy may say which cached prefixes are evicted first, or hold them."""

    _ranks: Retention | None  # None: the least recently used blocks are evicted first

    def retention(self, request: Request) -> float:
        """Rank of the request's cached blocks once it has given them up: when blocks are needed,
        those of the smallest rank are evicted first, of equal ranks the least recently used.

        Asked before the next step, after `on_finish`, or in the step that preempts the request, if
        it needs blocks after that. A time until which the prefix is worth its memory is a rank, and
        so is a probability that it is used again; what has no rank is evicted first. What several
        requests share has the rank that was stated last, and in any case no block is evicted before
        a cached one behind it.
        """
        return 0.0

    def retain(self, request: Request, rank: float, num_tokens: int | None = None) -> int:
        """Give the request's cached prefix, or that of its first `num_tokens` tokens, another rank
        than `retention` did: it has become more or less likely to be used. Holds until `retention`
        is asked again. The request need not live. Returns the tokens that are cached.
        """
        self._check_rank(rank, request)
        return self._begin_ranks().rank(request, rank, num_tokens)

    def _asked_ranks(self) -> Retention | None:
        """Ranks that `retention` is asked for; None: the policy does not have it."""
        is_asked = type(self).retention is not Retaining.retention
        return self._make_ranks(self._ask_retention) if is_asked else None

    def _begin_ranks(self) -> Retention:
        """Let ranks decide what is evicted, if they do not yet."""
        self._ranks = self._ranks or self._make_ranks(None)
        self.kv_cache.retention = Retention.replace(self.kv_cache.retention, self._ranks)
        return self._ranks

    def _make_ranks(self, ask: Callable[[Request], float] | None) -> Retention:
        return Retention(self.kv_cache.pool, self.kv_cache.block_size, ask)

    def _ask_retention(self, request: Request) -> float:
        rank: float = asking(self, "retention")(request)
        self._check_rank(rank, request)
        return rank

    def _check_rank(self, rank: object, request: Request) -> None:
        if not isinstance(rank, int | float) or rank != rank:
            raise PolicyError(
                f"policy {type(self).__name__}: the retention of a request is a number, got "
                f"{rank!r:.100} for {request.request_id!r}"
            )
