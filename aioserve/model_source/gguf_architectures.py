"""The architectures of GGUF files that are served, by llama.cpp's names.

What a key means is what llama.cpp's converter wrote it from; what no key says, llama.cpp knows.
"""

from collections.abc import Mapping

from aioserve.model_source.gguf_config import Architecture
from aioserve.model_source.gguf_delta_net import DELTA_NETS
from aioserve.model_source.gguf_dense import DENSE
from aioserve.model_source.gguf_experts import EXPERTS
from aioserve.model_source.gguf_gemma3n import GEMMA3N
from aioserve.model_source.gguf_gemma4 import GEMMA4
from aioserve.model_source.gguf_hybrids import HYBRIDS
from aioserve.model_source.gguf_latent import LATENT
from aioserve.model_source.gguf_others import OTHERS
from aioserve.model_source.gguf_recent import RECENT
from aioserve.model_source.gguf_recent_experts import RECENT_EXPERTS

ARCHITECTURES: Mapping[str, Architecture] = {
    **DENSE,
    **EXPERTS,
    **OTHERS,
    **GEMMA3N,
    **GEMMA4,
    **DELTA_NETS,
    **HYBRIDS,
    **LATENT,
    **RECENT,
    **RECENT_EXPERTS,
}
