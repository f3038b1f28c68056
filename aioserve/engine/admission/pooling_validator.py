"""Embeddings at the engine's door and at its exit: what may be asked, what a stream amounts to.

Knows what a model says of its vectors. Knows nothing about states, steps or HTTP.
"""

import msgspec

from aioserve.engine.stream import RequestStream
from aioserve.errors import (
    RequestAbortedError,
    RequestError,
    RequestFailedError,
    RequestTimeoutError,
)
from aioserve.model_info import ModelInfo
from aioserve.outputs import EmbeddingOutput, FinishReason
from aioserve.params import PoolingParams, SamplingParams
from aioserve.runner.info import RunnerInfo

#: What stands for sampling parameters where a prompt is pooled.
NOTHING_SAMPLED = SamplingParams(max_tokens=1, detokenize=False, output_kind="final_only")


class PoolingValidator:
    """Completes parameters, or raises `RequestError`."""

    def __init__(self, model_info: ModelInfo, runner_info: RunnerInfo) -> None:
        """Raises `ConfigError` for a damaged file."""
        self._model_info = model_info
        self.can_pool = can_pool = runner_info.supports_pooling
        self._stated = (model_info.stated_pooling or "last") if can_pool else None

    def complete(self, params: PoolingParams) -> PoolingParams:
        """Fill in how the model pools."""
        if not self.can_pool:
            raise RequestError("this engine's runner gives no hidden states to make embeddings of")
        if params.dimensions is not None:
            self._check_dimensions(params.dimensions)
        if params.pooling is not None:
            return params
        if self._stated not in ("mean", "last"):
            raise RequestError(
                f"the model was saved to pool by {self._stated}, which is not served: give "
                "pooling (mean or last)",
                param="pooling",
            )
        return msgspec.structs.replace(params, pooling=self._stated)

    def _check_dimensions(self, dimensions: int) -> None:
        """Only a model that was trained so has vectors whose beginnings mean something."""
        allowed = self._model_info.matryoshka_dimensions
        if not allowed:
            raise RequestError(
                "dimensions cannot be chosen: the model was not trained so that its vectors can be "
                "cut (matryoshka_dimensions or is_matryoshka in its configuration)",
                param="dimensions",
            )
        if dimensions not in allowed:
            known = f"1 to {allowed[-1]}" if isinstance(allowed, range) else str(list(allowed))
            raise RequestError(
                f"dimensions must be one of {known}, got {dimensions}", param="dimensions"
            )


async def read_embedding(stream: RequestStream) -> EmbeddingOutput:
    """What a stream of a request that is pooled amounts to. Raises where there is no vector."""
    async with stream:
        [output] = [output async for output in stream]
    if output.finish_reason is FinishReason.TIMEOUT:
        raise RequestTimeoutError(f"request {stream.request_id} has timed out")
    if output.finish_reason is FinishReason.ABORT:
        raise RequestAbortedError(f"request {stream.request_id} was aborted")
    if output.embedding is None:
        raise RequestFailedError("the runner computed the prompt and gave no vector of it")
    return EmbeddingOutput(
        request_id=stream.request_id,
        embedding=output.embedding,
        num_prompt_tokens=output.num_prompt_tokens,
        num_cached_tokens=output.num_cached_tokens,
    )
