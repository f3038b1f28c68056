"""Images and videos of a prompt: checked, and as the processors of the model prepare them.

What is no image and no video is refused by `RequestError` that names which. An image is prepared
alone, so that what is made of it depends on nothing else in the prompt, and is one input of the
encoder; a video is several, each of some of its frames. Knows processors of `transformers`; knows
no scheduler and no encoder. Preparing is done off the event loop. Last, what the door does: which
prompts may have images and videos, their tokens and arrays.
"""

import hashlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec
import numpy as np
from msgspec import Meta

from aioserve.engine.input_processor import PromptLimit
from aioserve.engine.prompt import (
    NO_IMAGES,
    NO_VIDEOS,
    NOT_READ,
    Conversation,
    Encoded,
    Messages,
    MultimodalPrompt,
    ReadMedia,
    Video,
)
from aioserve.errors import ConfigError, RequestError, one_line
from aioserve.features.multimodal.decoding import on_white
from aioserve.model_source.info import ModelInfo
from aioserve.model_source.vision_families import Family, family_of
from aioserve.request import EncoderInput
from aioserve.runner.interface import RunnerInfo

# Of the longer side to the shorter: some processors make the shorter one as long as they like it,
# and what that makes of the longer one would fill any memory.
MAX_RATIO = 200


class VideoSize(NamedTuple):
    """The size of a video: how many frames it has, and how many pixels each of them."""

    num_frames: int
    height: int
    width: int


def size_of(image: Any, name: str) -> tuple[int, int]:
    """Height and width. Raises `RequestError` for what is no image, with `name` as its `param`."""
    from PIL import Image

    if isinstance(image, Image.Image):
        width, height = image.size
    else:
        shape = tuple(getattr(image, "shape", ()))
        if len(shape) != 3 or shape[2] != 3 or not str(image.dtype).endswith("uint8"):
            raise RequestError(
                "an image must be one of PIL, or an array [height, width, 3] of uint8, got "
                f"{type(image).__name__}{f' {list(shape)}' if shape else ''}",
                param=name,
            )
        height, width = shape[:2]
    if not (height and width):
        raise RequestError(f"an image of {width} x {height} has no pixels", param=name)
    if max(height, width) > MAX_RATIO * min(height, width):
        raise RequestError(
            f"an image of {width} x {height} is too narrow: one side may be {MAX_RATIO} times as "
            "long as the other",
            param=name,
        )
    return height, width


def as_rgb(image: Any, name: str) -> Any:
    """Return the image as one of PIL, in RGB, white where it is transparent. Raises as
    `size_of`.
    """
    from PIL import Image

    size_of(image, name)
    if not isinstance(image, Image.Image):
        image = Image.fromarray(np.asarray(image))
    return on_white(image)


def video_size_of(video: Any, name: str) -> VideoSize:
    """Raises `RequestError` for what is no video, or one whose frames are of several sizes, with
    `name` as its `param`.
    """
    if not isinstance(video, Video):
        raise RequestError(f"a video must be a Video, got {type(video).__name__}", param=name)
    shape = tuple(getattr(video.frames, "shape", ()))
    try:
        num_frames = len(video.frames)
    except TypeError:
        num_frames = 0
    if not num_frames:
        raise RequestError("a video must have at least one frame", param=name)
    # The frames of one array are of one size.
    sizes = [_frame_size(video, i, name) for i in range(1 if shape else num_frames)]
    for i, size in enumerate(sizes):
        if size != sizes[0]:
            (height, width), (first_height, first_width) = size, sizes[0]
            raise RequestError(
                f"the frames of a video must be of one size: frame {i} is of {width} x {height}, "
                f"and frame 0 of {first_width} x {first_height}",
                param=name,
            )
    return VideoSize(num_frames, *sizes[0])


def frame_as_rgb(video: Video, i: int, name: str) -> np.ndarray:
    """Frame `i` of a video that has this frame: [height, width, 3] of uint8."""
    try:
        return np.asarray(as_rgb(video.frames[i], name))
    except RequestError as error:
        raise RequestError(f"frame {i}: {error}", param=name) from error


def _frame_size(video: Video, i: int, name: str) -> tuple[int, int]:
    try:
        return size_of(video.frames[i], name)
    except RequestError as error:
        raise RequestError(f"frame {i}: {error}", param=name) from error


class PreparedInput(NamedTuple):
    """An input that the encoder reads at once."""

    num_rows: int  # how many tokens of the prompt the encoder has a row for
    arrays: dict[str, np.ndarray]
    content_hash: str

    @classmethod
    def of(cls, model_type: str, num_rows: int, arrays: dict[str, np.ndarray]) -> "PreparedInput":
        """Make an input that is identified by the hash of `arrays`."""
        digest = hashlib.sha256(model_type.encode())
        for name, array in arrays.items():
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(array.data)
        return cls(num_rows, arrays, digest.hexdigest()[:32])


class Prepared(NamedTuple):
    """One image or video, ready for the prompt and the encoder."""

    text: str  # what stands in its place in the prompt
    inputs: Sequence[PreparedInput]  # in the order of their tokens


class Mark(NamedTuple):
    """The mark by which prompts of a model mention images, or videos."""

    kind: str  # "image" or "video"
    placeholder: str  # in a text, one for each
    token_id: int  # in the tokens, one for each row of the encoder


#: By kind, those of one prompt in its order.
AllPrepared = Mapping[str, Sequence[Prepared]]


class Marks:
    """The marks by which prompts of one model mention images and videos."""

    def __init__(self, marks: Sequence[Mark], together: bool) -> None:
        """`together`: whether the tokens of an input see each other in both directions."""
        self._marks, self._together = marks, together
        self._placeholders = re.compile("|".join(re.escape(mark.placeholder) for mark in marks))

    def check_counts(self, text: str, counts: Mapping[str, int]) -> None:
        """Raises `RequestError` unless `text` mentions as many of each kind as `counts` has."""
        for kind, placeholder, _ in self._marks:
            mentioned, num_given = text.count(placeholder), counts.get(kind, 0)
            if mentioned != num_given:
                raise RequestError(
                    f"the prompt mentions {mentioned} {kind}s ({placeholder!r}), and {num_given} "
                    "come with it",
                    param="prompt",
                )

    def expand(self, text: str, prepared: AllPrepared) -> str:
        """Return a text that `check_counts` has let pass, with all that images and videos stand
        for.
        """
        texts = {
            mark.placeholder: iter([own.text for own in prepared.get(mark.kind, ())])
            for mark in self._marks
        }
        return self._placeholders.sub(lambda match: next(texts[match[0]]), text)

    def place(
        self, token_ids: list[int], prepared: AllPrepared
    ) -> tuple[list[EncoderInput], list[str]]:
        """Return where in the tokens of such a text the inputs are, in order, and the name of each,
        as `images[i]` or `videos[i]`.
        """
        found = [
            placed
            for mark in self._marks
            for placed in self._place(mark, token_ids, prepared.get(mark.kind, ()))
        ]
        found.sort(key=lambda placed: placed[0].position)
        return [item for item, _ in found], [name for _, name in found]

    def _place(
        self, mark: Mark, token_ids: list[int], prepared: Sequence[Prepared]
    ) -> list[tuple[EncoderInput, str]]:
        places = np.flatnonzero(np.asarray(token_ids) == mark.token_id)
        num_rows = sum(one.num_rows for own in prepared for one in own.inputs)
        if prepared and len(places) != num_rows:
            raise RequestError(
                f"the prompt has {len(places)} tokens of {mark.kind}s, but its {mark.kind}s are "
                f"{num_rows}",
                param="prompt",
            )
        found, first = [], 0
        for i, own in enumerate(prepared):
            for one in own.inputs:
                begin, end = int(places[first]), int(places[first + one.num_rows - 1]) + 1
                item = EncoderInput(
                    begin, end - begin, one.content_hash, one.arrays, self._together
                )
                found.append((item, f"{mark.kind}s[{i}]"))
                first += one.num_rows
        return found


MISSING_PILLOW = "images need Pillow, which is not installed: pip install pillow num2words"


class ImageProcessor:
    """The image processor of one model: makes encoder inputs of images and videos."""

    def __init__(self, family: Family, info: ModelInfo, tokenizer: Any) -> None:
        """`tokenizer` is the model's; its processor may teach it tokens. Raises `ConfigError`."""
        if find_spec("PIL") is None:
            raise ConfigError(MISSING_PILLOW)
        self._family = family
        try:
            self._processor = load_processor(family, info, tokenizer)
        except Exception as error:  # transformers raises whatever the files provoke
            raise ConfigError(
                f"cannot read the image processor of {info.source.path}: {one_line(error)}"
            ) from error
        self.mark = Mark("image", self._processor.image_token, info.whole_config.image_token_id)
        if tokenizer.chat_template is None:  # older ones lie with the processor alone
            tokenizer.chat_template = self._processor.chat_template

    def least_tokens(self, images: Sequence[Any]) -> int:
        """Return how many tokens these stand for, as far as can be said before they are prepared.
        Raises `RequestError` for what is no image.
        """
        sizes = [size_of(image, f"images[{i}]") for i, image in enumerate(images)]
        if self._family.beside and len(images) > 1:  # fewer than it would be told
            return len(images)
        try:
            told = self._processor._get_num_multimodal_tokens(image_sizes=sizes).num_image_tokens
        except Exception:  # of a size that it cannot do: `prepare` of that image will say so
            return len(images)
        return sum(told)

    def prepare(self, images: Sequence[Any]) -> list[Prepared]:
        """Return what the processor makes of each. Raises `RequestError` that names one."""
        others = [_nothing()] if self._family.beside and len(images) > 1 else []
        return [self._prepare(image, i, others) for i, image in enumerate(images)]

    def _prepare(self, image: Any, i: int, others: list[Any]) -> Prepared:
        """`others` are images that make it prepared as one of several; each stands for as much."""
        shown = [as_rgb(image, f"images[{i}]"), *others]
        try:
            made = self._processor(
                images=[shown] if others else shown,
                text=[self.mark.placeholder * len(shown)],
                return_text_replacement_offsets=True,
                return_tensors="np",
            )
            arrays = {name: made[name] for name in self._family.arrays}
            if others:
                arrays = {name: array[:1] for name, array in arrays.items()}
            arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
            replaced = made["text_replacement_offsets"][0][0]
        except RequestError:
            raise
        except Exception as error:  # Pillow and transformers raise what they like
            raise RequestError(
                f"the image cannot be prepared: {one_line(error)}", f"images[{i}]"
            ) from error
        num_rows = int((np.asarray(made["input_ids"]) == self.mark.token_id).sum()) // len(shown)
        if not num_rows:
            raise RequestError("the image stands for no token", f"images[{i}]")
        prepared = PreparedInput.of(self._family.model_type, num_rows, arrays)
        return Prepared(replaced["replacement"], [prepared])


def _nothing() -> Any:
    """Return an image of one pixel."""
    from PIL import Image

    return Image.new("RGB", (1, 1))


def load_processor(family: Family, info: ModelInfo, tokenizer: Any) -> Any:
    """Load the processor as `AutoProcessor` does, but without that of videos, which needs
    torchvision.
    """
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    path = info.source.path
    if family.image_processor:
        image_processor = _own(family.image_processor).from_pretrained(path, local_files_only=True)
    else:
        image_processor = transformers.AutoImageProcessor.from_pretrained(
            path, backend="pil", local_files_only=True
        )
    if family.processor:
        cls = _own(family.processor)
    else:
        cls = getattr(transformers, PROCESSOR_MAPPING_NAMES[family.model_type])
    parts = {"image_processor": image_processor, "tokenizer": tokenizer}
    names = [name for name in cls.get_attributes() if name in parts]

    class WithoutOthers(transformers.ProcessorMixin):  # type: ignore[misc]
        """Stands behind `cls`, which may hand on by name what it was not given."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            given = {name: value for name, value in kwargs.items() if value is not None}
            super().__init__(*args, **given)

        @classmethod
        def get_attributes(cls) -> list[str]:
            return names

    own: Any = type(cls.__name__, (cls, WithoutOthers), {})
    stated, _ = cls.get_processor_dict(path, local_files_only=True)
    given = [parts.get(name) for name in cls.get_attributes()]
    return own.from_args_and_dict(given, stated)


def _own(name: str) -> Any:
    """Return a processor of this package, by its name."""
    return getattr(import_module("aioserve.features.multimodal.processors"), name)


# What is made of videos for a model that reads them: the arrays that the encoder reads.


_BICUBIC = 3  # the number that Pillow has for it
_Positive = Annotated[int, Meta(ge=1)]


class _Pixels(msgspec.Struct, frozen=True):
    """Pixels of a frame, or of all frames together: the least and the most."""

    shortest_edge: _Positive
    longest_edge: _Positive


class VideoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a video processor's file that are read."""

    size: _Pixels
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]
    patch_size: _Positive
    temporal_patch_size: _Positive = 2
    merge_size: _Positive = 2
    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    rescale_factor: Annotated[float, Meta(gt=0)] = 1 / 255
    resample: int = _BICUBIC
    cap_pixels_per_frame: bool | None = None
    max_video_tokens: _Positive
    fps: Annotated[float, Meta(gt=0)] | None = None

    def __post_init__(self) -> None:
        is_usual = self.do_resize and self.do_rescale and self.do_normalize
        if not is_usual or self.resample != _BICUBIC:
            raise ConfigError("only videos that are resized (bicubic) and normalized are prepared")

    @property
    def side(self) -> int:
        """Pixels that a token is wide and high."""
        return self.patch_size * self.merge_size


class FamilyVideos(Protocol):
    """The class of a family's videos, made of the `ModelInfo` of a model and its tokenizer."""

    placeholder: str  # of a video in a text

    def num_tokens(self, size: VideoSize) -> int:
        """Return the tokens of a video that the encoder has rows for. Raises `ValueError` for a
        size that is not served.
        """
        ...

    def arrays(
        self, frames: Iterator[np.ndarray], size: VideoSize, fps: float | None
    ) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """For each input of the encoder, in order, its rows and what the encoder reads. `frames`
        are [height, width, 3] of uint8.
        """
        ...

    def text(self, num_rows: Sequence[int], size: VideoSize, fps: float | None) -> str:
        """Return the text that a video stands for whose inputs have these rows."""
        ...


class VideoProcessor:
    """A processor that prepares the videos of one model."""

    def __init__(self, family: Family, info: ModelInfo, tokenizer: Any) -> None:
        """Make the processor for a family that reads videos. Raises `ConfigError`."""
        self._family = family
        try:
            own = getattr(import_module("aioserve.features.multimodal.processors"), family.videos)
            self._own: FamilyVideos = own(info, tokenizer)
        except Exception as error:  # whatever the files provoke
            raise ConfigError(
                f"cannot read the video processor of {info.source.path}: {one_line(error)}"
            ) from error
        self.mark = Mark("video", self._own.placeholder, info.whole_config.video_token_id)

    def least_tokens(self, videos: Sequence[Any]) -> int:
        """Return how many tokens these stand for at least. Raises `RequestError` for what is no
        video.
        """
        sizes = [video_size_of(video, f"videos[{i}]") for i, video in enumerate(videos)]
        return sum(self._num_tokens(size, i) for i, size in enumerate(sizes))

    def prepare(self, videos: Sequence[Any]) -> list[Prepared]:
        """Return what becomes of each. Raises `RequestError` that names one."""
        return [self._prepare(video, f"videos[{i}]") for i, video in enumerate(videos)]

    def _num_tokens(self, size: VideoSize, i: int) -> int:
        try:
            return self._own.num_tokens(size)
        except ValueError as error:
            raise RequestError(str(error), f"videos[{i}]") from error

    def _prepare(self, video: Video, name: str) -> Prepared:
        size = video_size_of(video, name)
        frames = (frame_as_rgb(video, i, name) for i in range(size.num_frames))
        try:
            inputs = [
                PreparedInput.of(self._family.model_type, num_rows, arrays)
                for num_rows, arrays in self._own.arrays(frames, size, video.fps)
            ]
            text = self._own.text([own.num_rows for own in inputs], size, video.fps)
        except RequestError:
            raise
        except Exception as error:  # what torch and transformers make of any size
            raise RequestError(f"the video cannot be prepared: {one_line(error)}", name) from error
        return Prepared(text, inputs)


# What the door does with images and videos.


logger = logging.getLogger(__name__)


class MultimodalProcessor:
    """A processor of prompts with images and videos, for one model and its tokenizer."""

    def __init__(self, info: ModelInfo, tokenizer: Any, runner_info: RunnerInfo) -> None:
        """Make the processor; what it lacks is logged, and text is served."""
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
    """Return messages with texts as contents, and how many of each of `kinds` they mention.
    Raises `RequestError` for another kind.
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
