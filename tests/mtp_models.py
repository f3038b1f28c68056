"""Tiny random models with a multi-token prediction layer, and in plain torch what it drafts.

The layer's weights have the names of published checkpoints. The reference is the definition in a
few lines, around a decoder layer of `transformers` with its own attention; it knows no engine.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from tests.architectures.tiny import Case, make_config, make_model

#: Families, with what their configurations need besides; those of one kind of names.
DEEPSEEK_NAMES = ("glm4_moe", "deepseek_v3", "glm4_moe_lite", "deepseek_v32", "llama")
QWEN_NAMES = ("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text")
#: Token norm, hidden norm, projection, last norm, layer.
_NAMES = {
    True: ("enorm", "hnorm", "eh_proj", "shared_head.norm", ""),
    False: ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0."),
}


def make_mtp_model(kind: str, path: Path, **fields: Any) -> Path:
    """A checkpoint with one MTP layer. `fields` are those of the configuration."""
    config = make_config(Case(kind, fields=tuple(fields.items())))
    make_model(config, path)
    weights = load_file(path / "model.safetensors")
    save_file(weights | _mtp_weights(kind, config), path / "model.safetensors", {"format": "pt"})
    return path


def _mtp_weights(kind: str, config: Any) -> dict[str, Tensor]:
    """By published names: those of a model of one layer, and of what stands before that."""
    is_deepseek, size = kind in DEEPSEEK_NAMES, config.hidden_size
    prefix = f"model.layers.{config.num_hidden_layers}." if is_deepseek else "mtp."
    tokens, hidden, projection, norm, layer = _NAMES[is_deepseek]
    with tempfile.TemporaryDirectory() as folder:
        make_model(_of_one_layer(config), Path(folder))
        own = load_file(Path(folder) / "model.safetensors")
    found = {
        prefix + layer + name.removeprefix("model.layers.0."): weight + 0.01
        for name, weight in own.items()
        if name.startswith("model.layers.0.")
    }
    generator = torch.Generator().manual_seed(2)
    for name in (tokens, hidden, norm):  # one is added to the weights of Qwen's norms
        noise = 0.3 * torch.randn(size, generator=generator)
        found[f"{prefix}{name}.weight"] = noise + (0 if kind.startswith("qwen") else 1)
    found[f"{prefix}{projection}.weight"] = 0.2 * torch.randn(size, 2 * size, generator=generator)
    if is_deepseek:  # published checkpoints have these copies
        found[f"{prefix}embed_tokens.weight"] = own["model.embed_tokens.weight"]
        found[f"{prefix}shared_head.head.weight"] = own["lm_head.weight"]
    return found


def _of_one_layer(config: Any) -> Any:
    fields = config.to_dict() | {"num_hidden_layers": 1}
    if fields.get("layer_types"):
        fields["layer_types"] = ["full_attention"]
    if fields.get("mlp_layer_types"):
        fields["mlp_layer_types"] = ["sparse"]
    if "first_k_dense_replace" in fields:
        fields["first_k_dense_replace"] = 0
    return type(config)(**fields)


class LibraryReference:
    """The first draft of whole texts, by `transformers`' own MTP layer, loaded by the library."""

    def __init__(self, path: Path, names: str | None = None) -> None:
        """`names`: pattern of the layer's weights, if the library knows published sizes alone."""
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        if names is not None:
            self._model._keys_to_ignore_on_load_unexpected = [names]
        self._layer = MtpModel.from_pretrained(self._model).eval()

    @torch.inference_mode()
    def draft(self, text: Sequence[int], count: int, among: Sequence[int]) -> list[int]:
        """The most likely of the tokens `among` these after `text`; no more than one."""
        states = self._model.model(torch.tensor([text[:-1]])).last_hidden_state
        out = self._layer.forward_layer(
            0,
            states,
            torch.arange(1, len(text))[None],
            MtpCache(config=self._model.config.get_mtp_config()),
            input_ids=torch.tensor([text[1:]]),
        )
        logits = self._model.lm_head(out[0, -1]).tolist()
        return [max(among, key=logits.__getitem__)][:count]


class MtpReference:
    """Drafts of whole texts: nothing is cached."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        kind = json.loads((path / "config.json").read_text())["model_type"]
        is_deepseek, config = kind in DEEPSEEK_NAMES, self.model.config
        prefix = f"model.layers.{config.num_hidden_layers}." if is_deepseek else "mtp."
        stored = {
            name.removeprefix(prefix): weight
            for name, weight in load_file(path / "model.safetensors").items()
            if name.startswith(prefix)
        }
        tokens, hidden, projection, norm, layer = _NAMES[is_deepseek]
        self._norms = [stored[f"{name}.weight"] for name in (tokens, hidden, norm)]
        self._projection = stored[f"{projection}.weight"]
        self._eps, self._is_added = config.rms_norm_eps, not is_deepseek
        one = AutoModelForCausalLM.from_config(_of_one_layer(config), attn_implementation="eager")
        self._layer = one.model.layers[0].float().eval()
        self._rotary = one.model.rotary_emb
        _fill(self._layer, {k.removeprefix(layer): w for k, w in stored.items()})

    @torch.inference_mode()
    def draft(self, text: Sequence[int], count: int, among: Sequence[int]) -> list[int]:
        """The most likely of the tokens `among` these after `text`, one after another."""
        states = self.model.model(torch.tensor([text[:-1]])).last_hidden_state[0]
        text = list(text)
        for _ in range(count):
            out = self._pass(torch.tensor(text[1:]), states)
            logits = self.model.lm_head(out[-1])
            text.append(max(among, key=logits.tolist().__getitem__))
            states = torch.cat((states, out[-1:]))
        return text[-count:]

    def _pass(self, token_ids: Tensor, states: Tensor) -> Tensor:
        tokens, hidden, last = self._norms
        embedded = self._norm(self.model.get_input_embeddings()(token_ids), tokens)
        x = torch.cat((embedded, self._norm(states, hidden)), dim=-1) @ self._projection.T
        places = torch.arange(len(x))[None]
        mask = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
        turns = self._rotary(x[None], places)
        out = self._layer(
            x[None], attention_mask=mask, position_ids=places, position_embeddings=turns
        )
        return self._norm(out[0], last)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._eps)
        return x * (weight + (1 if self._is_added else 0))


def _fill(layer: Any, stored: dict[str, Tensor]) -> None:
    """Copy `stored` into a decoder layer, whose experts lie in one tensor."""
    for name, parameter in [*layer.named_parameters(), *layer.named_buffers()]:
        before, _, kind = name.rpartition(".")
        if before.endswith(".experts"):
            names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            value = torch.stack(
                [
                    torch.cat([stored[f"{before}.{n}.{part}.weight"] for part in names])
                    for n in range(len(parameter))
                ]
            )
        else:
            value = stored[name]
        parameter.data.copy_(value)
