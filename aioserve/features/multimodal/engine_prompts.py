"""What the door does with images and videos: which prompts may have some, their tokens and arrays.

Knows prompts and templates; how either is prepared is known to `aioserve.features.multimodal`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aioserve.engine.prompt import (
    NO_IMAGES,
    NO_VIDEOS,
    NOT_READ,
    Conversation,
    Encoded,
    Messages,
    MultimodalPrompt,
    PromptLimit,
    ReadMedia,
)
from aioserve.errors import ConfigError, RequestError
from aioserve.features.multimodal.prompt import ImageProcessor, Marks, VideoProcessor
from aioserve.model_source.info import ModelInfo
from aioserve.model_source.vision_families import Family, family_of
from aioserve.runner.info import RunnerInfo

logger = logging.getLogger(__name__)


class MultimodalProcessor:
    """A processor of prompts with images and videos, for one model and its tokenizer."""

    def __init__(self, info: ModelInfo, tokenizer: Any, runner_info: RunnerInfo) -> None:
        """What its processor lacks is logged: text is served."""
        self._processors: dict[str, ImageProcessor | VideoProcessor] = {}  # by kind
        self._refusals: dict[str, str] = {}  # by kind, of those that are not read
        family = family_of(info)
        if family is None:
            self._refusals = {"image": NO_IMAGES, "video": NO_VIDEOS}
        elif not runner_info.supports_images:
            self._refusals = {"image": NOT_READ, "video": NOT_READ}
        else:
            self._load(family, info, tokenizer)
        marks = {kind: processor.mark for kind, processor in self._processors.items()}
        self._marks = Marks(list(marks.values()), family is not None and family.together)
        placeholders = {kind: mark.placeholder for kind, mark in marks.items()}
        self.media = ReadMedia(
            *(self._refusals.get(kind, "") for kind in ("image", "video")),
            *(placeholders.get(kind, "") for kind in ("image", "video")),
        )
        #: By kind, how a text mentions one.
        self.placeholders = placeholders

    def look_at(self, prompt: MultimodalPrompt, room: PromptLimit) -> tuple[str | Messages, int]:
        """Return the words of a prompt, without its images and videos, and how many tokens those
        stand for at least.

        Raises `RequestError` for those that cannot be served, or that are not those mentioned.
        """
        words, given = prompt.prompt, _given(prompt)
        for kind, those in given.items():
            if those and kind in self._refusals:
                raise RequestError(self._refusals[kind], param=f"{kind}s[0]")
            if those and room.keep is not None:
                raise RequestError(
                    f"truncate_prompt_tokens cannot be served with {kind}s: some would be cut",
                    param="truncate_prompt_tokens",
                )
        room.check(sum(map(len, given.values())), "at least ")
        if not isinstance(words, str):
            words, mentioned = _without_media(
                words.messages if isinstance(words, Conversation) else words,
                ("image", *(kind for kind in self._processors if kind != "image")),
            )
            for kind, those in given.items():
                if mentioned[kind] != len(those):
                    raise RequestError(
                        f"the messages mention {mentioned[kind]} {kind}s, and {len(those)} come "
                        "with them",
                        param="messages",
                    )
        processors = self._processors.items()
        return words, sum(own.least_tokens(given[kind]) for kind, own in processors if given[kind])

    def encode(
        self,
        prompt: MultimodalPrompt,
        room: PromptLimit,
        add_special_tokens: bool,
        encode: Callable[[str, bool], list[int]],
        render: Callable[[Conversation], str],
    ) -> Encoded:
        """Return one that `look_at` has let pass. `encode` makes tokens of a text, with special
        ones or without, and `render` a text of a conversation. Raises `RequestError`; takes its
        time.
        """
        text, given = prompt.prompt, _given(prompt)
        if not isinstance(text, str):
            text = text if isinstance(text, Conversation) else Conversation(text)
            text, add_special_tokens = render(text), False
        if not any(given.values()):
            return Encoded(room.cut(encode(text, add_special_tokens)))
        self._marks.check_counts(text, {kind: len(those) for kind, those in given.items()})
        processors = self._processors.items()
        prepared = {kind: own.prepare(given[kind]) for kind, own in processors if given[kind]}
        token_ids = encode(self._marks.expand(text, prepared), add_special_tokens)
        return Encoded(token_ids, *self._marks.place(token_ids, prepared))

    def _load(self, family: Family, info: ModelInfo, tokenizer: Any) -> None:
        name = info.config.served_name
        self._refusals = {"video": NO_VIDEOS}
        try:
            self._processors["image"] = ImageProcessor(family, info, tokenizer)
        except ConfigError as error:
            self._refusals = {"image": str(error), "video": str(error)}
            logger.warning("%s: images are refused: %s", name, error)
            return
        if family.videos:
            try:
                self._processors["video"] = VideoProcessor(family, info, tokenizer)
                self._refusals = {}
            except ConfigError as error:
                self._refusals = {"video": str(error)}
                logger.warning("%s: videos are refused: %s", name, error)


def _given(prompt: MultimodalPrompt) -> dict[str, Sequence[Any]]:
    """Return the images and the videos of a prompt, by kind."""
    return {"image": prompt.images, "video": prompt.videos}


def _without_media(messages: Messages, kinds: Sequence[str]) -> tuple[Messages, dict[str, int]]:
    """With contents as texts, and how many of each of `kinds` they mention. Raises `RequestError`
    for another one.
    """
    found, counts = [], {"image": 0, "video": 0}
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list):
            found.append(message)
            continue
        texts = []
        for k, part in enumerate(content):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if isinstance(kind, str) and kind in kinds:
                counts[kind] += 1
            elif kind == "text" and isinstance(part.get("text"), str):
                texts.append(part["text"])
            else:
                known = " or ".join(f'{{"type": "{name}"}}' for name in kinds)
                raise RequestError(
                    f'messages[{i}].content[{k}] must be {{"type": "text", "text": ...}} or '
                    f"{known}, got {part!r}",
                    param="messages",
                )
        found.append({**message, "content": "".join(texts)})
    return found, counts
