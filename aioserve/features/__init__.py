"""What not every model or request needs: each folder is one feature, loaded when asked for."""

from collections.abc import Mapping
from typing import Any

BRINGS: Mapping[str, Mapping[Any, str]] = {
    # Resources of the scheduler's side, by the names of their plans: `kv_cache.resource`.
    "caches": {
        "states": "aioserve.features.states.slots:StateSlotPool",
        "windows": "aioserve.features.states.windows:WindowBlockPool",
        "encoder": "aioserve.features.multimodal.encoder_cache:EncoderOutputs",
    },
    # Models on disk that are no plain directories: `model_source.source`.
    "model sources": {
        "gguf": "aioserve.features.gguf.file:GgufFile",
        "quantized directory": "aioserve.features.quantized.directory:QuantizedDirectory",
    },
    # What reads images and videos of bodies, and what brings them to the engine.
    "media": {
        "parts": "aioserve.features.multimodal.bodies:BodyMedia",
        "loader": "aioserve.features.multimodal.bodies:ImageLoader",
    },
}
