"""Prompts as callers write them and as the scheduler takes them: conversations, token ids, images.

Plain data, which checks itself. Knows no tokenizer, no template and no processor of images.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from aioserve.errors import RequestError
from aioserve.request import EncoderInput

# Stands inside of what would be a control: no text of a client holds it, nor does a template.
MARK = "\ue0fe\uf8fe\ue0fe"


def unmarked(text: str) -> str:
    """Return a text without its marks."""
    return text.replace(MARK, "")


Messages = Sequence[Mapping[str, Any]]


# What every template is given, or what `transformers` takes with it.
_OWN_NAMES = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "messages",
    "tokenize",
    "tools",
}


class Conversation(msgspec.Struct, frozen=True):
    """Messages as templates know them, and the tools that the model is told of.

    Messages hold "role" and "content"; those of an assistant may hold "tool_calls", each a
    {"id", "type", "function": {"name", "arguments"}} whose arguments are a mapping. Raises
    `RequestError` for what cannot go together.
    """

    messages: Messages
    tools: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool | None = None  # None: unless the last message goes on
    continue_final_message: bool = False  # the reply goes on with it, as if it had begun so
    template_kwargs: Mapping[str, Any] = {}  # what else the template looks at, by name
    # Hints, which a template may look at.
    reasoning_effort: str | None = None  # "none", or how much, in the template's words
    verbosity: str | None = None  # how long a reply is to be, in the template's words

    def __post_init__(self) -> None:
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise RequestError(
                    "continue_final_message and add_generation_prompt exclude each other: one goes "
                    "on with the last message, one begins the next",
                    param="continue_final_message",
                )
            if not self.messages or not isinstance(self.messages[-1].get("content"), str):
                raise RequestError(
                    "continue_final_message needs a last message with text",
                    param="continue_final_message",
                )
        for name in self.template_kwargs:
            if name in _OWN_NAMES:
                raise RequestError(
                    f"chat_template_kwargs must not hold {name!r}: the request has a field for it, "
                    "or the server has the say",
                    param=f"chat_template_kwargs.{name}",
                )


MIN_FPS, MAX_FPS = 0.001, 1000.0  # frames per second of a video


class Video(msgspec.Struct, frozen=True):
    """The frames of a video that a model is shown, all of one size, and how many there are of them
    in a second of it.

    Frames are images as those of a `MultimodalPrompt`, or one numpy array or torch tensor [frames,
    height, width, 3] of uint8. All of them are shown. Without `fps` they are as many in a second as
    the model's own processor would take (2, where it states nothing). Raises `RequestError`.
    """

    frames: Sequence[Any]
    fps: float | None = None  # frames per second of the video

    def __post_init__(self) -> None:
        fps = self.fps
        is_number = isinstance(fps, int | float) and not isinstance(fps, bool)
        if fps is not None and not (is_number and MIN_FPS <= fps <= MAX_FPS):
            raise RequestError(
                f"fps must be a number from {MIN_FPS:g} to {MAX_FPS:g}, got {fps!r}", param="fps"
            )


class MultimodalPrompt(msgspec.Struct, frozen=True):
    """A prompt and the images and videos that it mentions, each in that order.

    In messages and conversations, the content of a message may be a list of parts as chat templates
    know them, `{"type": "text", "text": ...}`, `{"type": "image"}` and `{"type": "video"}`. In a
    text, the model's own placeholders stand for them, as its processor knows them ("<image>").

    Images are those of PIL, or numpy arrays or torch tensors [height, width, 3] of uint8; videos
    are `Video`s. An invalid one raises `RequestError` whose `param` is `images[i]` or `videos[i]`.
    """

    prompt: str | Messages | Conversation
    images: Sequence[Any] = ()
    videos: Sequence[Video] = ()


NO_IMAGES = "this model reads no images, it is one for text"


NO_VIDEOS = "this model reads no videos"


NOT_READ = "this engine reads no images, though its model does: that needs unquantized files"


class Encoded(NamedTuple):
    """A prompt as the scheduler takes it."""

    token_ids: list[int]
    encoder_inputs: Sequence[EncoderInput] = ()
    names: Sequence[str] = ()  # of the image or video that each of them is of, as `images[i]`

    def check_arrays(self, names: Sequence[str]) -> None:
        """Raises `RequestError` for an encoder input without all arrays of these names."""
        for i, item in enumerate(self.encoder_inputs):
            if missing := [name for name in names if name not in (item.arrays or {})]:
                raise RequestError(
                    f"encoder_inputs[{i}] comes without {', '.join(missing)}, which the encoder of "
                    "this model reads",
                    param=f"encoder_inputs[{i}]",
                )

    def name_part(self, error: RequestError) -> None:
        """Let an error that names an encoder input name its image or video."""
        for i, name in enumerate(self.names):
            if error.param == f"encoder_inputs[{i}]":
                error.args = (str(error).replace(error.param, name),)
                error.param = name
                return


class ReadMedia(msgspec.Struct, frozen=True):
    """The media that prompts of a model may hold besides text, and how a text mentions them."""

    refuses_images: str  # why; empty: images are read
    refuses_videos: str
    image_placeholder: str = ""
    video_placeholder: str = ""

    @classmethod
    def none(cls, why: str) -> "ReadMedia":
        """Return the media of a model or engine that reads neither images nor videos: `why` says
        so.
        """
        return cls(why, why)
