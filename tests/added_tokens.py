"""Small tokenizers with the added tokens of real families, flagged as those flag them.

Made of the embedded tokenizer, so that its weights run: the tokens of a family take the ids of its
last ones. What ends a text, what is text and what is a control, decide what a grammar may force.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from tests.server.scripted import CHATML, EMBEDDED, HERMES
from tests.tokenizing import share_tokenizer

_NFC = {"type": "NFC"}
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


class Family(NamedTuple):
    """Added tokens of a family of models: controls, and those that are text in its replies."""

    eos: tuple[str, ...]
    controls: tuple[str, ...]
    texts: tuple[str, ...] = ()
    parser: str = "none"  # of its tool calls
    reasoning: str = "none"
    template: str = HERMES
    flags: Mapping[str, bool] = MappingProxyType({})  # of the texts, besides `special`
    normalizer: dict[str, Any] | None = None
    is_sentence_piece: bool = False


_BARS = "<\uff5c%s\uff5c>"
_DEEPSEEK_CALLS = ("tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end")

#: By name: Qwen 3 (2.5 lacks the last four), Llama 3, Gemma 3, Mistral since Nemo, gpt-oss,
#: DeepSeek V3.1 and Phi-4-mini.
FAMILIES = {
    "qwen": Family(
        eos=("<|im_end|>", "<|endoftext|>"),
        controls=("<|im_start|>", "<|object_ref_start|>", "<|vision_start|>", "<|image_pad|>"),
        texts=(
            *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_suffix|>", "<|repo_name|>"),
            *("<tool_response>", "</tool_response>", "<think>", "</think>"),
        ),
        parser="hermes",
        reasoning="qwen3",
        template=CHATML,
        normalizer=_NFC,
    ),
    "llama": Family(
        eos=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
        controls=(
            *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
            "<|finetune_right_pad_id|>",
        ),
        parser="llama3_json",
    ),
    "gemma": Family(
        eos=("<end_of_turn>", "<eos>"),
        controls=("<pad>", "<bos>", "<unk>", "<start_of_turn>", "<start_of_image>"),
        texts=("<mask>", "[multimodal]", "<unused0>", "\n\n", "<table>", "<h1>", "</h1>"),
        parser="json",
        is_sentence_piece=True,
    ),
    "mistral": Family(
        eos=("</s>",),
        controls=(
            *("<unk>", "<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "<pad>", "[IMG]"),
        ),
        parser="mistral",
    ),
    "gpt_oss": Family(
        eos=("<|return|>", "<|call|>"),
        controls=(
            *("<|startoftext|>", "<|endoftext|>", "<|constrain|>", "<|channel|>", "<|start|>"),
            *("<|end|>", "<|message|>", "<|endofprompt|>"),
        ),
        parser="harmony",
        reasoning="auto",
    ),
    "deepseek": Family(
        eos=(_BARS % "end▁of▁sentence",),
        controls=(_BARS % "begin▁of▁sentence", _BARS % "▁pad▁"),
        texts=(
            *(_BARS % name for name in ("User", "Assistant", *_DEEPSEEK_CALLS, "tool▁sep")),
            *("<think>", "</think>"),
        ),
        parser="deepseek_v31",
        reasoning="qwen3",
        flags={"normalized": True},
    ),
    "phi": Family(
        eos=("<|end|>", "<|endoftext|>"),
        controls=("<|system|>", "<|user|>", "<|assistant|>"),
        texts=("<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>", "<|tool_response|>"),
        parser="phi4_mini",
        flags={"rstrip": True},
    ),
}


def family_model(family: Family, path: Path) -> str:
    """Write the files of a model of a family with the weights of the embedded one to `path`."""
    path.mkdir(exist_ok=True)
    tokenizer = json.loads((EMBEDDED / "tokenizer.json").read_text())
    tokenizer["normalizer"] = family.normalizer
    tokenizer["added_tokens"] = []
    vocab = tokenizer["model"]["vocab"]
    for token in [token for token in vocab if vocab[token] < 4]:  # its own controls
        token_id = vocab.pop(token)
        vocab[f"unused{token_id}"] = token_id
    if family.is_sentence_piece:
        _spell_as_sentence_piece(tokenizer)
    known = tokenizer["model"]["vocab"]
    names = [*family.eos, *family.controls, *family.texts]
    new = [name for name in names if name not in known]
    for name, token_id in zip(new, _free(tokenizer, len(new)), strict=True):
        known[name] = token_id
    for name in names:
        is_text = name in family.texts
        flags = {"normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
        own = {**flags, **(family.flags if is_text else {}), "special": not is_text}
        tokenizer["added_tokens"].append({"id": known[name], "content": name, **own})
    tokenizer["added_tokens"].sort(key=lambda added: added["id"])
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    stated = json.loads((EMBEDDED / "tokenizer_config.json").read_text())
    stated |= {"eos_token": family.eos[0], "pad_token": family.eos[0], "extra_special_tokens": []}
    (path / "tokenizer_config.json").write_text(json.dumps(stated))
    eos_ids = [known[name] for name in family.eos]
    for file in ("config.json", "generation_config.json"):
        stated = json.loads((EMBEDDED / file).read_text())
        (path / file).write_text(json.dumps({**stated, "eos_token_id": eos_ids}))
    (path / "chat_template.jinja").write_text(family.template)
    shutil.copy(EMBEDDED / "model.safetensors", path)
    share_tokenizer(path)
    return str(path)


def _free(tokenizer: dict[str, Any], number: int) -> list[int]:
    """Ids of the last tokens, which the vocabulary loses."""
    model = tokenizer["model"]
    last = sorted(model["vocab"], key=model["vocab"].__getitem__)[-number:] if number else []
    model["merges"] = [m for m in model["merges"] if not {*m, "".join(m)} & {*last}]
    return [model["vocab"].pop(token) for token in last]


def _spell_as_sentence_piece(tokenizer: dict[str, Any]) -> None:
    """Tokens are characters with `▁` for a space, and bytes by name for what is no token."""
    from aioserve.support.tokens import spelled_bytes

    model = tokenizer["model"]
    texts: dict[str, str] = {}
    for token in model["vocab"]:
        try:
            texts[token] = (spelled_bytes(token) or token.encode()).decode().replace(" ", "▁")
        except UnicodeDecodeError:
            continue
    merges = [[texts[part] for part in merge] for merge in model["merges"] if {*merge} <= {*texts}]
    known = {texts[token]: token_id for token, token_id in model["vocab"].items() if token in texts}
    model["merges"] = [merge for merge in merges if "".join(merge) in known]
    model["vocab"], taken = known, {*known.values()}
    free = [token_id for token_id in range(2048) if token_id not in taken]
    free += _free(tokenizer, len(_BYTES) - len(free))
    known |= zip(_BYTES, free, strict=False)
    model |= {"byte_fallback": True, "fuse_unk": True}
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    tokenizer["normalizer"] = space
    tokenizer["pre_tokenizer"] = {**split, "invert": False}
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    tokenizer["decoder"] = {"type": "Sequence", "decoders": decoders}
