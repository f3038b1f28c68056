"""Tiny random models that see, as directories with a tokenizer and a processor of their own.

The text parts are those of `tests.models`. Needs Pillow; knows no engine.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aioserve.config import ModelConfig
from aioserve.engine.prompt import Video
from aioserve.features.multimodal.prompt import VideoProcessor, load_processor
from aioserve.model_source.info import ModelInfo
from aioserve.model_source.vision_families import family_of
from tests.models import COMMON, made_once

if TYPE_CHECKING:
    from tests.greedy import GreedyTokens

NUM_TOKENS = 12
EMBEDDED = Path(__file__).parents[1] / "aioserve" / "model_source" / "embedded"
_VOCAB_SIZE = 2112  # that of the embedded tokenizer, and room for marks

_TEXT = COMMON | {"vocab_size": _VOCAB_SIZE}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "initializer_range": 0.2,
}

_TEMPLATE = """{% for m in messages %}<{{ m['role'] }}>{% for part in m['content'] %}\
{% if part['type'] == 'image' %}IMAGE{% elif part['type'] == 'video' %}VIDEO\
{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


def picture(seed: int, width: int, height: int) -> Any:
    """One of PIL, with large shapes of its own."""
    from PIL import Image

    random = np.random.default_rng(seed)
    small = random.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


Fields = dict[str, Any]


def _idefics3(marks: dict[str, int], kind: str = "idefics3") -> tuple[Fields, Fields]:
    names = {"idefics3": "Idefics3", "smolvlm": "SmolVLM"}
    config = {
        "vision_config": _VISION,
        "text_config": {"model_type": "llama", **_TEXT},
        "scale_factor": 2,
        "image_token_id": marks["<image>"],
    }
    processor = {
        "processor_class": f"{names[kind]}Processor",
        "image_processor_type": f"{names[kind]}ImageProcessor",
        "size": {"longest_edge": 64},
        "max_image_size": {"longest_edge": 32},
        "do_image_splitting": True,
        "image_seq_len": 4,
    }
    return config, processor


def _qwen2_5_vl(marks: dict[str, int]) -> tuple[Fields, Fields]:
    config = {
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "out_hidden_size": _TEXT["hidden_size"],
            "initializer_range": 0.2,
        },
        "text_config": {
            **_TEXT,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 3, 3],
            },
        },
        "image_token_id": marks["<|image_pad|>"],
        "video_token_id": marks["<|video_pad|>"],
        "vision_start_token_id": marks["<|vision_start|>"],
        "vision_end_token_id": marks["<|vision_end|>"],
    }
    processor = {
        "processor_class": "Qwen2_5_VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 4,
        "merge_size": 2,
        "size": {"shortest_edge": 16 * 16, "longest_edge": 48 * 48},
    }
    return config, processor


def _qwen2_vl(marks: dict[str, int]) -> tuple[Fields, Fields]:
    config, processor = _qwen2_5_vl(marks)
    vision = {
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": _TEXT["hidden_size"],
        "num_heads": 4,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "initializer_range": 0.2,
    }
    return {**config, "vision_config": vision}, {**processor, "processor_class": "Qwen2VLProcessor"}


def _llava(marks: dict[str, int]) -> tuple[Fields, Fields]:
    config = {
        "vision_config": {"model_type": "clip_vision_model", "projection_dim": 32, **_VISION},
        "text_config": {"model_type": "llama", **_TEXT},
        "image_token_index": marks["<image>"],
        "image_seq_length": 16,
    }
    processor = {
        "processor_class": "LlavaProcessor",
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 32},
        "crop_size": {"height": 32, "width": 32},
        "patch_size": 8,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
    }
    return config, processor


def _llava_next(marks: dict[str, int]) -> tuple[Fields, Fields]:
    config, processor = _llava(marks)
    pinpoints = [[32, 64], [64, 32]]
    return {**config, "image_grid_pinpoints": pinpoints}, {
        **processor,
        "processor_class": "LlavaNextProcessor",
        "image_processor_type": "LlavaNextImageProcessor",
        "image_grid_pinpoints": pinpoints,
    }


def _gemma3(marks: dict[str, int]) -> tuple[Fields, Fields]:
    config = {
        "vision_config": _VISION,
        "text_config": {
            **_TEXT,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 24,
            "query_pre_attn_scalar": 16,
        },
        "image_token_index": marks["<image_soft_token>"],
        "boi_token_index": marks["<start_of_image>"],
        "eoi_token_index": marks["<end_of_image>"],
        "mm_tokens_per_image": 16,
    }
    processor = {
        "processor_class": "Gemma3Processor",
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 32, "width": 32},
        "image_seq_length": 16,
    }
    return config, processor


def _qwen3_vl(marks: dict[str, int]) -> tuple[Fields, Fields]:
    config, processor = _qwen2_5_vl(marks)
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
        "out_hidden_size": _TEXT["hidden_size"],
        "initializer_range": 0.2,
    }
    return {**config, "vision_config": vision}, {**processor, "processor_class": "Qwen3VLProcessor"}


def _qwen3_vl_moe(marks: dict[str, int]) -> tuple[Fields, Fields]:
    config, processor = _qwen3_vl(marks)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    return {**config, "text_config": {**config["text_config"], **experts}}, processor


def _internvl(marks: dict[str, int]) -> tuple[Fields, Fields]:
    config = {
        "vision_config": {**_VISION, "image_size": [32, 32], "patch_size": [8, 8]},
        "text_config": {"model_type": "qwen2", **_TEXT},
        "image_token_id": marks["<IMG_CONTEXT>"],
        "image_seq_length": 4,
    }
    processor = {
        "processor_class": "InternVLProcessor",
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": 32, "width": 32},
        "min_patches": 4,
        "max_patches": 7,
        "image_seq_length": 4,
    }
    return config, processor


def _pixtral(marks: dict[str, int]) -> tuple[Fields, Fields]:
    config = {
        "vision_config": {"model_type": "pixtral", **_VISION},
        "text_config": {"model_type": "llama", **_TEXT},
        "image_token_index": marks["[IMG]"],
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "image_seq_length": 1,
    }
    processor = {
        "processor_class": "PixtralProcessor",
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": 52},
        "patch_size": 8,
    }
    return config, processor


def _mistral3(marks: dict[str, int]) -> tuple[Fields, Fields]:
    config, processor = _pixtral(marks)
    del config["vision_feature_select_strategy"], config["image_seq_length"]
    config |= {"text_config": {"model_type": "mistral", **_TEXT}, "tie_word_embeddings": False}
    return config | {"spatial_merge_size": 2}, {
        **processor,
        "size": {"longest_edge": 84},
        "spatial_merge_size": 2,
    }


def _llava_onevision(marks: dict[str, int]) -> tuple[Fields, Fields]:
    pinpoints = [[32, 32], [32, 64], [64, 32]]
    config = {
        "vision_config": {
            "model_type": "siglip_vision_model",
            "vision_use_head": False,
            **_VISION,
        },
        "text_config": {"model_type": "qwen2", **_TEXT},
        "image_token_index": marks["<image>"],
        "video_token_index": marks["<video>"],
        "image_grid_pinpoints": pinpoints,
    }
    processor = {
        "processor_class": "LlavaOnevisionProcessor",
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "size": {"height": 32, "width": 32},
        "image_grid_pinpoints": pinpoints,
        "num_image_tokens": 16,
        "vision_feature_select_strategy": "full",
    }
    return config, processor


def _llama4(marks: dict[str, int]) -> tuple[Fields, Fields]:
    config = {
        "vision_config": {
            **_VISION,
            "image_size": 32,
            "vision_output_dim": 48,
            "projector_input_dim": 48,
            "projector_output_dim": 48,
            "intermediate_size": 4 * 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "text_config": {
            **_TEXT,
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 0, 1, 0],
            "layer_types": ["chunked_attention", "full_attention"] * 2,
            "attention_chunk_size": 24,
            "floor_scale": 16,
            "attn_scale": 0.5,
            "intermediate_size_mlp": 96,
            "interleave_moe_layer_step": 2,
            "num_local_experts": 4,
        },
        "image_token_index": marks["<|patch|>"],
        "boi_token_index": marks["<|image_start|>"],
        "eoi_token_index": marks["<|image_end|>"],
    }
    processor = {
        "processor_class": "Llama4Processor",
        "image_processor_type": "Llama4ImageProcessorFast",
        "size": {"height": 32, "width": 32},
        "max_patches": 5,
        "patch_size": 8,
    }
    return config, processor


def _gemma4(marks: dict[str, int], **text: Any) -> tuple[Fields, Fields]:
    config = {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "patch_size": 2,
            "position_embedding_size": 640,
            "initializer_range": 0.2,
        },
        "text_config": {
            **_TEXT,
            "pad_token_id": 0,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 24,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 30.0,
            "use_bidirectional_attention": "vision",
            **text,
        },
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        **{
            f"{name}_token_id": marks[mark]
            for name, mark in (("image", "<|image|>"), ("boi", "<|image>"), ("eoi", "<image|>"))
        },
        "video_token_id": marks["<|video|>"],
        "audio_token_id": marks["<|audio|>"],
    }
    processor = {
        "processor_class": "Gemma4Processor",
        "image_processor_type": "Gemma4ImageProcessor",
        "patch_size": 2,
        "max_soft_tokens": 70,
        "pooling_kernel_size": 3,
    }
    return config, processor


def _gemma4_small(marks: dict[str, int]) -> tuple[Fields, Fields]:
    layer_rows = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": _VOCAB_SIZE}
    return _gemma4(marks, use_bidirectional_attention=None, num_kv_shared_layers=2, **layer_rows)


_KINDS: dict[str, Callable[[dict[str, int]], tuple[Fields, Fields]]] = {
    "internvl": _internvl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "qwen3_vl": _qwen3_vl,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gemma4_small": _gemma4_small,
    "llama4": _llama4,
    "llava_onevision": _llava_onevision,
    "mistral3": _mistral3,
    "pixtral": _pixtral,
    "llava": _llava,
    "llava_next": _llava_next,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "idefics3": _idefics3,
    "smolvlm": lambda marks: _idefics3(marks, "smolvlm"),
}
_MARKS = {
    "idefics3": [
        *("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"),
        *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
    ],
}
_MARKS["llava"] = _MARKS["llava_next"] = ["<image>"]
_MARKS["llava_onevision"] = ["<image>", "<video>"]
_MARKS["pixtral"] = _MARKS["mistral3"] = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
_MARKS["llama4"] = [
    *("<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>"),
    *("<|tile_x_separator|>", "<|tile_y_separator|>"),
]
_MARKS["gemma4"] = _MARKS["gemma4_small"] = [
    *("<|image|>", "<|image>", "<image|>", "<|video|>"),
    *("<|audio|>", "<|audio>", "<audio|>"),
]
_MARKS["gemma3"] = ["<image_soft_token>", "<start_of_image>", "<end_of_image>"]
_NAMED_MARKS = {
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
    "gemma3": {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    },
}
_NAMED_MARKS["gemma4"] = _NAMED_MARKS["gemma4_small"] = {
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}
_MARKS["smolvlm"] = _MARKS["idefics3"]
_MARKS["internvl"] = ["<img>", "</img>", "<IMG_CONTEXT>", "<video>"]
_MARKS["qwen3_vl_moe"] = _MARKS["qwen3_vl"] = _MARKS["qwen2_vl"] = _MARKS["qwen2_5_vl"] = [
    "<|vision_start|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_end|>",
]
SEEING_KINDS = tuple(_KINDS)
#: In `make test`: of encoders that are much the same, one.
FEW_KINDS = (*("gemma3", "gemma4", "internvl", "llama4", "mistral3", "qwen2_5_vl", "qwen3_vl"),)
_MODEL_TYPES = {"pixtral": "llava", "gemma4_small": "gemma4"}  # where a type has several kinds
# Of the processor itself; the rest is of its image processor.
_OWN_FIELDS = (
    "processor_class",
    "image_seq_len",
    "image_seq_length",
    "num_additional_image_tokens",
    "num_image_tokens",
    "patch_size",
    "spatial_merge_size",
    "vision_feature_select_strategy",
)
#: What stands for an image in a text.
PLACEHOLDERS = {
    "internvl": "<IMG_CONTEXT>",
    "qwen3_vl_moe": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
    "gemma4": "<|image|>",
    "gemma4_small": "<|image|>",
    "llama4": "<|image|>",
    "llava_onevision": "<image>",
    "mistral3": "[IMG]",
    "pixtral": "[IMG]",
    "llava": "<image>",
    "llava_next": "<image>",
    "idefics3": "<image>",
    "smolvlm": "<image>",
    "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
}
#: What stands for a video in a text, of those that read some.
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
VIDEO_KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")


@made_once
def make_seeing_model(
    kind: str,
    path: Path,
    vision: Fields | None = None,
    processing: Fields | None = None,
    **overrides: Any,
) -> Path:
    """Write a model of one of `SEEING_KINDS` to `path` and return `path`. `overrides` are fields of
    the configuration of its text model, `vision` and `processing` those of its encoder and of its
    image processor.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        EMBEDDED, extra_special_tokens=_NAMED_MARKS.get(kind, {})
    )
    tokenizer.add_special_tokens({"additional_special_tokens": _MARKS[kind]})
    marks = {mark: tokenizer.convert_tokens_to_ids(mark) for mark in _MARKS[kind]}
    tokenizer.chat_template = _TEMPLATE.replace("IMAGE", PLACEHOLDERS[kind]).replace("VIDEO", VIDEO)
    fields, processor = _KINDS[kind](marks)
    fields["text_config"] |= overrides
    fields["vision_config"] = {**fields["vision_config"], **(vision or {})}
    processor |= processing or {}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(_MODEL_TYPES.get(kind, kind), **fields)
    )
    if kind == "gemma3":  # else images are zeros, and layers too quiet beside the embedding
        for name, parameter in model.named_parameters():
            if "mm_input_projection" in name:
                torch.nn.init.normal_(parameter)
            if "layernorm" in name and "post" in name:
                torch.nn.init.constant_(parameter, 6.0)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    own = {name: processor[name] for name in _OWN_FIELDS if name in processor}
    (path / "processor_config.json").write_text(json.dumps(own))
    return path


class Seeing:
    """A tiny model, and what `generate` makes of prompts."""

    def __init__(self, kind: str, path: Path, **overrides: Any) -> None:
        """`overrides` are fields of the configuration of its text model."""
        from transformers import AutoModelForImageTextToText, AutoTokenizer

        self.kind, self.mark = kind, PLACEHOLDERS[kind]
        self.path = make_seeing_model(kind, path, **overrides)
        self.model: Any = AutoModelForImageTextToText.from_pretrained(path).eval()
        info = ModelInfo(ModelConfig(model=str(path)))
        tokenizer, family = AutoTokenizer.from_pretrained(path), family_of(info)
        assert family is not None, "all of these see"
        self.processor: Any = load_processor(family, info, tokenizer)
        self._videos = VideoProcessor(family, info, tokenizer) if family.videos else None

    def tokens(
        self,
        text: str,
        images: Sequence[Any],
        num_tokens: int = NUM_TOKENS,
        videos: Sequence[Video] = (),
    ) -> "GreedyTokens":
        """An object that equals the greedy tokens after a prompt; all images in one call."""
        import torch

        from tests.greedy import GreedyTokens, surprises

        def judge(tokens: list[int]) -> list[int]:
            logits = self.logits(text, images, tokens, self.model, videos)
            return surprises(logits, tokens, torch.float32)

        def generate() -> list[int]:
            given = self.given(text, images, (), videos)
            output = self.model.generate(
                **given, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
            )
            found: list[int] = output[0, given["input_ids"].shape[1] :].tolist()
            return found

        return GreedyTokens(num_tokens, judge, generate)

    def given(
        self,
        text: str,
        images: Sequence[Any],
        tokens: Sequence[int],
        videos: Sequence[Video] = (),
    ) -> dict[str, Any]:
        """What a module is given of a prompt, and of `tokens` behind it."""
        import torch

        images_or_none = [list(images)] if images else None
        of_videos: dict[str, Any] = {}
        if videos:
            text, of_videos = self._with_videos(text, videos)
            self.processor.video_token = None  # there is nothing left for it to do
        given = dict(self.processor(text=[text], images=images_or_none, return_tensors="pt"))
        given |= of_videos
        if videos:
            is_video = given["input_ids"] == self.model.config.video_token_id
            given["mm_token_type_ids"] = given["mm_token_type_ids"].masked_fill(is_video, 2)
        tail = torch.tensor([list(tokens)], dtype=torch.long)
        for name, more in (
            ("input_ids", tail),
            ("attention_mask", torch.ones_like(tail)),
            ("mm_token_type_ids", torch.zeros_like(tail)),
            ("token_type_ids", torch.zeros_like(tail)),
        ):
            if name in given:
                given[name] = torch.cat((given[name], more), dim=1)
        return given

    def logits(
        self,
        text: str,
        images: Sequence[Any],
        tokens: list[int],
        module: Any,
        videos: Sequence[Video] = (),
    ) -> Any:
        """Of each of `tokens` after a prompt, [n, V], by `module`."""
        import torch

        # Marks of images in a reply are text, as in `generate`: in one call they would be places.
        is_apart = getattr(module.config, "image_token_id", None) in tokens[:-1]
        given = self.given(text, images, () if is_apart else tokens[:-1], videos)
        if "pixel_values" in given:  # which Llama 4 wants so, and others make so
            given["pixel_values"] = given["pixel_values"].to(module.dtype)
        getattr(module, "model", module).rope_deltas = None  # of a prompt before
        with torch.inference_mode():
            found = module(**given, use_cache=is_apart)
            logits = found.logits[0]
            for token in tokens[:-1] if is_apart else ():
                step = torch.tensor([[token]])
                found = module(input_ids=step, past_key_values=found.past_key_values)
                logits = torch.cat((logits, found.logits[0]))
            return logits[-len(tokens) :].float()

    def _with_videos(self, text: str, videos: Sequence[Video]) -> tuple[str, dict[str, Any]]:
        """A text in which they stand, and the arrays of all of them, as the processors of
        `transformers` give them to a model: tests/multimodal/test_qwen_videos.py compares both.
        """
        import torch

        assert self._videos is not None, "it reads some"
        grids, pixels, seconds = [], [], []
        for video, prepared in zip(videos, self._videos.prepare(videos), strict=True):
            text = text.replace("<|video_pad|>", prepared.text.replace("video", "VIDEO"), 1)
            arrays = [one.arrays for one in prepared.inputs]
            pixels += [each["pixel_values"] for each in arrays]
            grids.append([len(arrays), *arrays[0]["image_grid_thw"][0, 1:].tolist()])
            seconds.append(2 / (video.fps or 2))
        found = {
            "pixel_values_videos": torch.from_numpy(np.concatenate(pixels)),
            "video_grid_thw": torch.tensor(grids),
        }
        if self.kind == "qwen2_5_vl":
            found["second_per_grid_ts"] = torch.tensor(seconds)
        return text.replace("VIDEO", "video"), found

    def prompts(self) -> list[tuple[str, list[Any]]]:
        """None to four images each, two of them in more than one prompt."""
        mark, sizes = self.mark, [(70, 40), (30, 30), (25, 90), (64, 64)]
        a, b, c, d = (picture(i, *size) for i, size in enumerate(sizes))
        return [
            (f"{mark} What is this?", [a]),
            (f"Say: {mark} and {mark}, what?", [b, c]),
            (f"{mark}{mark} to be {mark} or not {mark} to be", [d, a, b, c]),
            ("No picture at all, my lord", []),
            (f"The same again {mark}", [a]),
            (f"Who's there? {mark}", [a]),
        ]
