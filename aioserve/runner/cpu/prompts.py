"""A step in which somebody asks how likely the tokens of a prompt are.

Knows a model and numbers; knows nothing about requests.
"""

import numpy as np
import torch
from torch import Tensor

from aioserve.outputs import TokenLogprobs
from aioserve.runner.attention.backend import LayerAttention, ModelInputs
from aioserve.runner.cpu.sampler import token_logprobs
from aioserve.runner.prompt_logprobs import WantedLogprobs
from aioserve.runner.served_model import ServedModel


def forward_and_look(
    model: ServedModel, inputs: ModelInputs, attention: LayerAttention, wanted: WantedLogprobs
) -> tuple[Tensor, list[TokenLogprobs]]:
    """Logits [S, V] as `model.forward` gives them, and what is wanted of prompts: their logits are
    made, looked at and forgotten piece by piece.
    """
    sampling = inputs.logits_rows.numpy()
    rows = np.sort(np.concatenate((sampling, wanted.places)))
    states = model.hidden(inputs._replace(logits_rows=torch.from_numpy(rows)), attention)
    logits = model.logits(states[torch.from_numpy(np.searchsorted(rows, sampling))])
    places = torch.from_numpy(np.searchsorted(rows, wanted.places))
    found: list[TokenLogprobs] = []
    for piece in wanted.pieces(logits.shape[1]):
        found += token_logprobs(
            model.logits(states[places[piece]]),
            wanted.token_ids[piece],
            wanted.num_logprobs[piece],
        )
    return logits, found
