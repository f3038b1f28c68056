"""What the door does with images: which prompts may have some, and their tokens and arrays.

Knows prompts and templates; how an image is prepared is known to `aioserve.multimodal`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from aioserve.engine.admission.chat_template import ChatTemplate, Conversation, Messages
from aioserve.engine.admission.prompt_limit import PromptLimit
from aioserve.errors import ConfigError, RequestError
from aioserve.model_info import ModelInfo
from aioserve.multimodal import MultimodalPrompt
from aioserve.multimodal.families import family_of
from aioserve.multimodal.processing import ImageProcessor
from aioserve.request import EncoderInput
from aioserve.runner.info import RunnerInfo

logger = logging.getLogger(__name__)

NO_IMAGES = "this model reads no images, it is one for text"
NOT_READ = (
    "this engine reads no images, though its model does: they are served on a CPU, and from "
    "unquantized files"
)


class Encoded(NamedTuple):
    """A prompt as the scheduler takes it."""

    token_ids: list[int]
    encoder_inputs: Sequence[EncoderInput] = ()


class MultimodalProcessor:
    """Of one model and its tokenizer."""

    def __init__(self, info: ModelInfo, tokenizer: Any, runner_info: RunnerInfo) -> None:
        """What its processor lacks is logged: text is served."""
        self._processor: ImageProcessor | None = None
        family = family_of(info)
        self.refusal = NO_IMAGES if family is None else NOT_READ  # empty: images are read
        if family is not None and runner_info.supports_images:
            try:
                self._processor = ImageProcessor(family, info, tokenizer)
                self.refusal = ""
            except ConfigError as error:
                self.refusal = str(error)
                logger.warning("%s: images are refused: %s", info.config.served_name, error)
        # in a text, one for each image; empty: there can be none
        self.placeholder = "" if self._processor is None else self._processor.placeholder
        self.template = ChatTemplate(tokenizer, self.placeholder or None)

    def look_at(self, prompt: MultimodalPrompt, room: PromptLimit) -> tuple[str | Messages, int]:
        """The words of a prompt, without its images, and how many tokens those stand for at least.

        Raises `RequestError` for images that cannot be served, or that are not those mentioned.
        """
        words, images = prompt.prompt, prompt.images
        if images and self.refusal:
            raise RequestError(self.refusal, param="images[0]")
        if images and room.keep is not None:
            raise RequestError(
                "truncate_prompt_tokens cannot be served with images: some would be cut",
                param="truncate_prompt_tokens",
            )
        room.check(len(images), "at least ")
        if not isinstance(words, str):
            words, mentioned = _without_images(
                words.messages if isinstance(words, Conversation) else words
            )
            if mentioned != len(images):
                raise RequestError(
                    f"the messages mention {mentioned} images, and {len(images)} come with them",
                    param="messages",
                )
        return words, self._processor.least_tokens(images) if self._processor and images else 0

    def encode(
        self,
        prompt: MultimodalPrompt,
        room: PromptLimit,
        add_special_tokens: bool,
        encode: Callable[[str, bool], list[int]],
    ) -> Encoded:
        """One that `look_at` has let pass. `encode` makes tokens of a text, with special ones or
        without. Raises `RequestError`; takes its time.
        """
        text, images = prompt.prompt, prompt.images
        if not isinstance(text, str):
            text = text if isinstance(text, Conversation) else Conversation(text)
            text, add_special_tokens = self.template.render(text), False
        if not images:
            return Encoded(room.cut(encode(text, add_special_tokens)))
        assert self._processor is not None, "`look_at`"
        self._processor.check_count(text, images)
        prepared = self._processor.prepare(images)
        token_ids = encode(self._processor.expand(text, prepared), add_special_tokens)
        return Encoded(token_ids, self._processor.place(token_ids, prepared))


def _without_images(messages: Messages) -> tuple[Messages, int]:
    """With contents as texts, and how many images they mention. Raises `RequestError`."""
    found, num_images = [], 0
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list):
            found.append(message)
            continue
        texts = []
        for k, part in enumerate(content):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind == "image":
                num_images += 1
            elif kind == "text" and isinstance(part.get("text"), str):
                texts.append(part["text"])
            else:
                raise RequestError(
                    f'messages[{i}].content[{k}] must be {{"type": "text", "text": ...}} or '
                    f'{{"type": "image"}}, got {part!r}',
                    param="messages",
                )
        found.append({**message, "content": "".join(texts)})
    return found, num_images
