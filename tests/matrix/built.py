"""The tiny models of the matrix, each made once: by its features, with adapter, heads and drafts.

All have the embedded tokenizer, so that every one takes grammars. Knows no engine.
"""

import json
import shutil
from collections.abc import Callable, Collection
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.adapters import ALL_LINEAR, ATTENTION, make_adapter, merge
from tests.eagle_models import make_head
from tests.matrix.asks import ADDED
from tests.matrix.features import MODELS
from tests.models import make_model
from tests.mtp_models import make_mtp_model
from tests.seeing_models import EMBEDDED, Seeing

VOCAB_SIZE = 2112  # that of the embedded tokenizer, and room for marks of images
EOS = 0
# Half of an MLP, or of an expert, is whole groups of quantized inputs.
_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "eos_token_id": EOS,
    "max_position_embeddings": 1024,
    "intermediate_size": 128,
}
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def _plain(kind: str, **fields: Any) -> Callable[[Path], Path]:
    return lambda path: make_model(kind, path, **_TEXT, **fields)


def _mtp(kind: str, **fields: Any) -> Callable[[Path], Path]:
    return lambda path: make_mtp_model(kind, path, **_TEXT, **fields)


_WINDOWS = {
    "sliding_window": 24,
    "use_sliding_window": True,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_hidden_layers": 3,
}
_STATES = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_LFM3 = {
    "num_hidden_layers": 5,
    "layer_types": ["conv", "sliding_attention", "full_attention", "conv", "sliding_attention"],
    "sliding_window": 24,
}


def _seeing(kind: str, **fields: Any) -> Callable[[Path], Seeing]:
    return lambda path: Seeing(kind, path, eos_token_id=EOS, intermediate_size=128, **fields)


#: By what a model is, and whether it has an MTP layer: how it is made, and which of its linear
#: layers have an adapter.
_KINDS: dict[frozenset[str], tuple[str, Callable[[Path], Path | Seeing], tuple[str, ...]]] = {
    frozenset(): ("Llama", _plain("llama"), ALL_LINEAR),
    frozenset({"MTP"}): ("Llama with an MTP layer", _mtp("llama"), ALL_LINEAR),
    frozenset({"states"}): ("Qwen3.5", _mtp("qwen3_5_text", **_STATES), (*ATTENTION, *_MLP)),
    frozenset({"windows"}): ("Qwen3", _plain("qwen3", **_WINDOWS), ALL_LINEAR),
    frozenset({"windows", "MTP"}): (
        "MiMo-V2-Flash",
        _mtp("mimo_v2_flash"),
        ATTENTION,
    ),
    frozenset({"experts"}): ("Mixtral", _plain("mixtral"), ATTENTION),
    frozenset({"experts", "MTP"}): ("GLM-4.5", _mtp("glm4_moe"), ATTENTION),
    frozenset({"images"}): ("Idefics3", _seeing("idefics3"), _MLP),
    frozenset({"states", "experts"}): (
        "Qwen3.5-MoE",
        _mtp("qwen3_5_moe_text", **_STATES),
        ATTENTION,
    ),
    frozenset({"states", "windows"}): ("LFM3", _plain("lfm3", **_LFM3), ("q_proj", "k_proj")),
    frozenset({"windows", "experts"}): ("gpt-oss", _plain("gpt_oss"), ATTENTION),
    frozenset({"images", "windows"}): ("Gemma 3", _seeing("gemma3"), _MLP),
    frozenset({"images", "experts"}): (
        "Qwen3-VL-MoE",
        _seeing("qwen3_vl_moe", moe_intermediate_size=64),
        ATTENTION,
    ),
}


#: Those of the above that have an MTP layer in any case.
_ALSO_MTP = (frozenset({"states"}), frozenset({"states", "experts"}))


def model_key(features: Collection[str]) -> frozenset[str] | None:
    """Which model has these features; None: none has all of them."""
    key = frozenset(features) & {*MODELS, "MTP"}
    for found in (key, key - {"MTP"}):
        if found in _KINDS and ("MTP" not in key or found == key or found in _ALSO_MTP):
            return found
    return None


def names_of_models() -> str:
    """The models that have two features, in words."""
    return "; ".join(
        f"{' and '.join(sorted(key))}, {name}"
        for key, (name, _, _) in _KINDS.items()
        if len(key) == 2
    )


class BuiltModel:
    """One model on disk, and what comes with it."""

    def __init__(self, key: frozenset[str], folder: Path, has_added: bool = False) -> None:
        """`has_added`: its tokenizer has the tokens of `asks.ADDED`, which are text."""
        self.key, self.has_added = key, has_added
        self.name, make, self._targets = _KINDS[key]
        self._folder = folder
        made = make(folder / "model")
        self.seeing = made if isinstance(made, Seeing) else None
        self.path = made.path if isinstance(made, Seeing) else made
        if self.seeing is None:
            _add_tokenizer(self.path)
        if has_added:
            _add_tokens(self.path)

    @cached_property
    def adapter(self) -> Path:
        """A LoRA adapter for linear layers of its text."""
        config = json.loads((self.path / "config.json").read_text())
        of_mtp = ("mtp.", f"model.layers.{config.get('num_hidden_layers')}.")
        return make_adapter(
            self.path, self._folder / "adapter", rank=5, targets=self._targets, but=of_mtp
        )

    @cached_property
    def merged(self) -> Path:
        """The model with the adapter in its weights."""
        return merge(self.path, self.adapter, self._folder / "merged")

    @cached_property
    def copy(self) -> Path:
        """Other files of the same model."""
        return Path(shutil.copytree(self.path, self._folder / "copy"))

    @cached_property
    def draft(self) -> Path:
        """A Llama with the same tokenizer."""
        from transformers import AutoTokenizer

        path = make_model("llama", self._folder / "draft", **_TEXT)
        _add_tokenizer(path)
        AutoTokenizer.from_pretrained(self.path).save_pretrained(path)
        return path

    @cached_property
    def head(self) -> Path:
        """An EAGLE-3 head that knows nothing."""
        layers = (0, 1, 2)
        return make_head(self._folder / "head", target=64, layers=layers, vocab_size=VOCAB_SIZE)


class Builds:
    """All models of a run of the matrix, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[tuple[frozenset[str], bool], BuiltModel] = {}

    def model(self, features: Collection[str]) -> BuiltModel:
        """The model that has these features."""
        key = model_key(features)
        assert key is not None, f"{features} have no model"
        has_added = "added tokens" in features
        if (key, has_added) not in self._made:
            name = "-".join([*sorted(key), *["added"] * has_added]) or "plain"
            made = BuiltModel(key, self._folder / name.lower(), has_added)
            self._made[key, has_added] = made
        return self._made[key, has_added]

    def new_folder(self, name: str) -> Path:
        """An empty folder for what a run leaves on disk."""
        number = len(list(self._folder.iterdir()))
        path = self._folder / f"{name}-{number}"
        path.mkdir()
        return path

    @property
    def folder(self) -> Path:
        """Where all of it is."""
        return self._folder


def _add_tokens(path: Path) -> None:
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    added = tokenizer["added_tokens"]
    first = max([*tokenizer["model"]["vocab"].values(), *(token["id"] for token in added)]) + 1
    for token_id, text in enumerate(ADDED, first):
        added.append({**added[0], "id": token_id, "content": text, "special": False})
    file.write_text(json.dumps(tokenizer))


def _add_tokenizer(path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(EMBEDDED / name, path)
    file = path / "generation_config.json"
    stated = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**stated, "eos_token_id": EOS}))
