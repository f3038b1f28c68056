"""Whether groups of quantized weights can be shared out: told before any of them is read.

Reads the headers of files, and of the model an outline without weights.
"""

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from aioserve.model_info import ModelInfo
from aioserve.model_source.quantized import check_whole_groups
from aioserve.runner.tensor_parallel.plan import EXPERTS, plan_of

_BY_INPUTS = ("rowwise", "rowwise_split_input", EXPERTS)


def check_groups(info: ModelInfo, num_ranks: int) -> None:
    """Raise `ConfigError` that names a layer of whose inputs a rank would get a part of a group, in
    files of quantized weights.
    """
    config: Any = copy.deepcopy(info.whole_config)
    for part in (config, config.get_text_config(decoder=True)):
        vars(part).pop("quantization_config", None)  # `transformers` would want its readers
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(
            config, trust_remote_code=info.config.trust_remote_code
        )
    kinds = info.source.stored_kinds(outline)
    for name, style in plan_of(outline).items():
        if style not in _BY_INPUTS:
            continue
        own = "down_proj" if style == EXPERTS else "weight"
        kind = kinds.get(f"{name}.{own}")
        if kind is None:
            continue
        part = outline.get_submodule(name)
        is_transposed = style == EXPERTS and getattr(part, "is_transposed", False)
        count = getattr(part, own).shape[-2 if is_transposed else -1]
        check_whole_groups(name, kind, count, slice(0, count // num_ranks))
