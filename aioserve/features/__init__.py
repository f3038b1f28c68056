"""What not every model or request needs: each folder is one feature, loaded when asked for."""

from collections.abc import Mapping
from typing import Any

BRINGS: Mapping[str, Mapping[Any, str]] = {
    # What reads images and videos of bodies, and what brings them to the engine.
    "media": {
        "parts": "aioserve.features.multimodal.bodies:BodyMedia",
        "loader": "aioserve.features.multimodal.bodies:ImageLoader",
    },
}
