"""What the runner needs from a model, whichever tier computes it: a name, sizes, logits.

Two implementations: `loader.AnyModel` (modules of `transformers` as they are) and
`fused.FusedModel` (our own loop over the layers). Knows nothing about requests.
"""

from abc import ABC, abstractmethod

from torch import Tensor

from aioserve.runner.attention.backend import AttentionBackend, KVCacheSpec, StepInputs


class ServedModel(ABC):
    """Weights in evaluation mode, and what their attention layers look like."""

    name: str  # of the architecture, with the tier that computes it
    num_parameters: int  # tied ones counted once
    kv_cache_spec: KVCacheSpec

    @abstractmethod
    def forward(self, inputs: StepInputs, backend: AttentionBackend) -> Tensor:
        """Logits [S, V] of the rows that sample. `backend` was prepared for `inputs`."""
