"""What `transformers` makes of a GGUF file: the configuration and the weights, all in float32.

Reads nothing by code of aioserve: of what both read, a fault would be no difference.
"""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

# Two tokens whose logits are this near are both the best one: sums in float32, in another order,
# differ by some 1e-5 of what all logits are spread over.
TIE = 1e-3  # standard deviations of all logits


class Reference:
    """A model that is asked about whole texts."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        self._model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        # Without its children, for each of which the table of all names would be made again.
        top = SimpleNamespace(
            config=config, state_dict=self._model.state_dict, named_children=tuple
        )
        tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=top)["tensors"]
        missing = self._model.load_state_dict(tensors, strict=False).missing_keys
        assert missing == (["lm_head.weight"] if config.tie_word_embeddings else [])
        self._model.tie_weights()
        self._judged: dict[tuple[int, ...], list[int]] = {}

    @torch.inference_mode()
    def surprises(self, prompt: list[int], reply: list[int]) -> list[int]:
        """Places of the tokens of `reply` that are not the likeliest behind all before them."""
        key = (len(prompt), *prompt, *reply)
        if key not in self._judged:
            ids = torch.tensor([prompt + reply[:-1]])
            logits = self._model(ids, use_cache=False).logits[0, len(prompt) - 1 :]
            said = logits.gather(1, torch.tensor(reply)[:, None])[:, 0]
            is_best = logits.amax(1) - said <= TIE * logits.std(1)
            self._judged[key] = (~is_best).nonzero()[:, 0].tolist()
        return self._judged[key]

    @torch.inference_mode()
    def losses(self, window: list[int]) -> Tensor:
        """Of every token but the first: [len(window) - 1], in nats."""
        ids = torch.tensor(window)
        logits = self._model(ids[None, :-1], use_cache=False).logits[0]
        return nn.functional.cross_entropy(logits, ids[1:], reduction="none")


def perplexity(losses: list[Tensor]) -> float:
    """Of all tokens together."""
    return math.exp(float(torch.cat(losses).double().mean()))
