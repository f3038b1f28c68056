"""Which formats there are: those that ship, those of installed packages, and those of files.

`SHIPPED` is where a format that ships is registered. Imports nothing but the formats that are asked
for.
"""

import logging
from collections.abc import Iterator
from importlib.metadata import EntryPoint

from aioserve.errors import ConfigError
from aioserve.formats.reply_format import ReplyFormat
from aioserve.support.plugins import Kind, installed, installed_entry_points

logger = logging.getLogger(__name__)

GROUP = "aioserve.formats"  # of entry points, by which other packages register formats

#: By name, where the class is: in the order in which a chat template is asked for each.
SHIPPED = {
    "harmony": "aioserve.formats.harmony:HarmonyParser",
    "gemma4": "aioserve.formats.gemma4:Gemma4Parser",
    "lfm2": "aioserve.formats.lfm2:Lfm2Parser",
    "olmo3": "aioserve.formats.olmo3:Olmo3Parser",
    "llama4_pythonic": "aioserve.formats.llama4:Llama4PythonicParser",
    "llama4_json": "aioserve.formats.llama4:Llama4JsonParser",
    "deepseek_v3": "aioserve.formats.deepseek:DeepSeekV3Parser",
    "deepseek_v31": "aioserve.formats.deepseek:DeepSeekV31Parser",
    "nemotron": "aioserve.formats.marked_json:NemotronParser",
    "apriel": "aioserve.formats.marked_json:AprielParser",
    "phi4_mini": "aioserve.formats.marked_json:Phi4Parser",
    "granite": "aioserve.formats.marked_json:GraniteParser",
    "mistral": "aioserve.formats.mistral:MistralParser",
    "deepseek_v32": "aioserve.formats.deepseek_v32:DeepSeekV32Parser",
    "deepseek_v4": "aioserve.formats.deepseek_v32:DeepSeekV4Parser",
    "kimi_k2": "aioserve.formats.kimi_k2:KimiK2Parser",
    "minimax_m2": "aioserve.formats.minimax_m2:MiniMaxM2Parser",
    "seed_oss": "aioserve.formats.seed_oss:SeedOssParser",
    "glm47": "aioserve.formats.glm:Glm47Parser",
    "glm": "aioserve.formats.glm:GlmParser",
    "qwen3_coder": "aioserve.formats.qwen3_coder:Qwen3CoderParser",
    "hermes": "aioserve.formats.hermes:HermesParser",
    "llama3_json": "aioserve.formats.llama3:Llama3Parser",
    "json": "aioserve.formats.plain_json:PlainJsonParser",
}


def available_formats() -> dict[str, EntryPoint]:
    """Formats by name, sorted by it; `ConfigError` if two packages claim one name."""
    return installed(GROUP, "format", [EntryPoint(*each, GROUP) for each in SHIPPED.items()])


_FORMAT = Kind(
    word="format",
    words="formats",
    interface=ReplyFormat,  # type: ignore[type-abstract]
    base="CallParser or ReplyFormat",
    available=available_formats,
)


def load_format(spec: str) -> type[ReplyFormat]:
    """The format that `spec` names: a name, `package.module`, `file.py`, either with `:Class`.

    Raises `ConfigError` that lists what there is, or says by file and line why it cannot be
    imported.
    """
    return _FORMAT.load(spec)


def asked_formats() -> Iterator[tuple[str, type[ReplyFormat]]]:
    """Names and formats in the order in which a chat template is asked for each: those of other
    packages first, since they were installed for a reason.
    """
    for entry_point in sorted(installed_entry_points(GROUP), key=lambda e: e.name):
        name = entry_point.name
        try:
            yield name, load_format(entry_point.value)
        except ConfigError as error:
            logger.warning("the format %s of another package is passed over: %s", name, error)
    for name, value in SHIPPED.items():
        yield name, load_format(value)
