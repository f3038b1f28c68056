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
#: Letters that have cases, as DeepSeek's tokenizer lists them; some scripts are left out.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    _DIGIT,
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
    "deepseek-llm": _DEEPSEEK_LLM,
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
