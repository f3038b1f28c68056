"""How a byte-level vocabulary of a GGUF file splits text before it merges: `tokenizer.ggml.pre`.

`transformers` knows some of these names, and takes GPT-2's way for all others, in silence. Here are
those of the architectures that are served; another name is refused, for its tokens would be others
than those that the model has learned.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aioserve.errors import ConfigError

#: Names of GPT-2's own way, and of none.
_AS_GPT2 = (
    *("default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"),
    *("exaone4", "gigachat", "a.x-4.0", "mellum", "modern-bert", "jina-es", "jina-de"),
    *("jina-v1-en", "jina-v2-es", "jina-v2-de", "jina-v2-code", "roberta-bpe"),
)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_SEED = _QWEN2.replace(r"| ?[^\s\p{L}\p{N}]+[\r\n]*|", r"| ?[^\s\p{L}\p{N}\r\n]+|")
_DIGIT = r"\p{N}"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    _DIGIT,
)
_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_GPT2 = "GPT-2"  # in the place of an expression: its own way, among the pieces so far
#: Expressions that are applied one after the other: what each finds becomes a piece of its own.
_SPLITS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("chatglm-bpe", "glm4", "glm5"), (_LLAMA3,)),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), (_QWEN2,)),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"),
        (_DIGIT, _GPT2),
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), (_BLOOM,)),
    "deepseek-coder": _DEEPSEEK_CODER,
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "seed-coder": (_SEED,),
    "viking": (_BLOOM, _DIGIT),
}


def split_as_stated(path: Path, metadata: Mapping[str, Any], tokenizer: Any) -> None:
    """Have a tokenizer that `transformers` made split text as its file states. Raises `ConfigError`
    for a way that is not known.
    """
    from tokenizers import Regex, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    stated = metadata.get("tokenizer.ggml.pre", "default")
    if metadata.get("tokenizer.ggml.model") != "gpt2" or stated in _AS_GPT2:
        return
    if stated in GGUF_PRE_TOKENIZER_SPLITS:
        return
    if stated not in _SPLITS:
        raise ConfigError(
            f"{path}: tokenizer.ggml.pre is {stated!r:.49}, a way to split text that is not read; "
            "its tokens would not be those that the model has learned"
        )
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    steps = [
        gpt2 if split == _GPT2 else pre_tokenizers.Split(Regex(split), "isolated")
        for split in _SPLITS[stated]
    ]
    if _GPT2 not in _SPLITS[stated]:
        steps.append(last)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
