"""The samples of one request, and the ids that nobody else may take while one of them lives.

Knows ids and the stream. Knows nothing about tokens.
"""

from collections.abc import Callable, Iterator

import msgspec

from aioserve.engine.stream import RequestStream
from aioserve.request import RequestSpec


class Samples:
    """The samples of one request: they share a reader, and nobody else gets their ids or its own
    while one of them lives.
    """

    __slots__ = (
        "adapter_id",
        "claimed_ids",
        "ids",
        "is_aborted",
        "is_arriving",
        "let_go",
        "num_live",
        "request_id",
        "stream",
    )

    def __init__(self, stream: RequestStream, n: int) -> None:
        self.request_id = stream.request_id
        self.stream = stream
        self.ids = [self.request_id]
        self.claimed_ids = self.ids
        if n > 1:
            self.ids = [f"{self.request_id}-{i}" for i in range(n)]
            self.claimed_ids = [self.request_id, *self.ids]
        self.num_live = n
        self.is_arriving = True  # being tokenized: nothing can be ended yet
        self.is_aborted = False  # meanwhile
        self.adapter_id = ""
        # Of their adapter, or no longer waits for it; may be called again.
        self.let_go: Callable[[], None] | None = None

    def specs(self, spec: RequestSpec) -> Iterator[RequestSpec]:
        """What each sample is of what was asked for: one token after another from its own seed."""
        if len(self.ids) == 1:
            yield spec
            return
        params = spec.sampling_params
        for index, sample_id in enumerate(self.ids):
            own = msgspec.structs.replace(
                params,
                n=1,
                seed=None if params.seed is None else params.seed + index,
                # Of the prompt that they share, the first sample tells.
                prompt_logprobs=None if index else params.prompt_logprobs,
            )
            yield msgspec.structs.replace(spec, request_id=sample_id, sampling_params=own)
