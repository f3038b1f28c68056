"""How many tokens a simulated client allows for a reply, apart from how many the reply has.

No server knows how long a reply will be: the model ends it. What a server is told is `max_tokens`,
the client's limit, and a lab that sent the length as the limit would tell every policy the future.
"""

import re

import msgspec

from aioserve.errors import ConfigError

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
        """The tokens that a client allows for a reply of `output_tokens`: `stated` is what the
        workload says of it, `default` what holds where nothing else says it.
        """
        if self.tokens is not None:
            return self.tokens
        if self.factor is not None:
            return max(int(self.factor * output_tokens), output_tokens)
        return default if stated is None else stated


def default_max_tokens(longest_reply: int) -> int:
    """The limit of clients that state none, from the tokens of the workload's longest reply."""
    return max(DEFAULT_MAX_TOKENS, 1 << max(longest_reply - 1, 0).bit_length())
