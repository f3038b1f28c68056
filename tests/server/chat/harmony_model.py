"""The embedded model with the marks of harmony in its vocabulary, as special tokens."""

import json
from collections.abc import Sequence
from pathlib import Path

from aioserve.features.formats.harmony import HarmonyParser
from tests.server.scripted import make_model


def harmony_model(path: Path, template: str, special: Sequence[str] = HarmonyParser.markers) -> str:
    """Its files but for the weights; the token that ends its texts is none of harmony's."""
    make_model(path, template)
    for file in path.glob("*.json"):
        file.write_text(file.read_text().replace("<|end|>", "<|over|>"))
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    model = tokenizer["model"]
    for last, mark in zip(
        sorted(model["vocab"], key=model["vocab"].get)[::-1], special, strict=False
    ):
        model["merges"] = [m for m in model["merges"] if "".join(m) != last]
        model["vocab"][mark] = (at := model["vocab"].pop(last))
        tokenizer["added_tokens"].append(
            {**tokenizer["added_tokens"][0], "id": at, "content": mark}
        )
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(path)
