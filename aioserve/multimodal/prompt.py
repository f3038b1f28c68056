"""A prompt with images, as callers of the engine write it. Knows no model and no tokens."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from aioserve.engine.admission.chat_template import Conversation


class MultimodalPrompt(msgspec.Struct, frozen=True):
    """A prompt and the images that it mentions, in that order.

    In messages and conversations, the content of a message may be a list of parts as chat templates
    know them, `{"type": "text", "text": ...}` and `{"type": "image"}`. In a text, the model's own
    placeholder stands for an image, as its processor knows it ("<image>").

    Images are those of PIL, or numpy arrays or torch tensors [height, width, 3] of uint8. An
    invalid one raises `RequestError` whose `param` is `images[i]`.
    """

    prompt: "str | Sequence[Mapping[str, Any]] | Conversation"
    images: Sequence[Any]
