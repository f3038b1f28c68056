"""Files of every architecture that is read are the models of their directories, to the last key."""

import functools
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from aioserve.config import ModelConfig
from aioserve.errors import ConfigError
from aioserve.features.gguf.architectures import ARCHITECTURES
from aioserve.features.gguf.config import (
    DIVISORS,
    LONG,
    OF_STRETCHES,
    SHORT,
    WITHOUT_EFFECT,
    Facts,
    Metadata,
    RopeTensors,
    read_fields,
)
from aioserve.features.gguf.header import read_header, unpack
from aioserve.model_source.info import ModelInfo
from tests.gguf_written import WRITTEN, Written, make_written
from tests.slow import mostly_slow

IDS = torch.randint(3, 250, (1, 60), generator=torch.Generator().manual_seed(5))
#: Keys that say how long a text may be, which no token of a shorter one feels.
LIMITS = {"context_length"}
#: Keys of which another one makes nothing.
UNFELT = {
    "granitemoehybrid-dense": {"feed_forward_length"},
    "qwen3_5": {"full_attention_interval"},
    "qwen3_5-equal": {"full_attention_interval"},
    "qwen3_5-mtp": {"full_attention_interval"},
}
ORIGINAL = "rope.scaling.original_context_length"


def load(path: Path) -> Any:
    source = ModelInfo(ModelConfig(model=str(path))).source
    return source.load_module(torch.float32, torch.device("cpu"), "eager")


@torch.inference_mode()
def logits(module: Any) -> torch.Tensor:
    found: torch.Tensor = module(IDS).logits
    return found


_FEW = """
    arcee deepseek_v2-kv_b youtu falcon falcon_h1-plain gemma2 gemma3_text gemma4-31b
    gemma4-experts glm4_moe gpt_oss gpt2 gpt_neox granitemoehybrid-dense granitemoe
    granitemoeshared hunyuan_v1_moe jamba lfm2_moe llama-linear llama3 mixtral mamba mamba2
    minimax_m2 ministral3 nemotron_h olmo olmo3 olmoe phi3 phi3-long qwen3_5 qwen3_next
    smollm3 stablelm-2 gpt_bigcode apertus gemma3n_text llama4_text bamba glm_moe_dsa
    deepseek_v32 minicpm3 cohere2_moe granitemoe_swa hy_v3 mellum minicpm
"""
#: In `make test`: half of the architectures, whose files run every line of facts, layouts and
#: weights that any file runs.
FEW = _FEW.split()


@pytest.mark.parametrize("name", mostly_slow(WRITTEN, but=FEW))
def test_a_file_computes_what_its_directory_computes(name: str, tmp_path: Path) -> None:
    case = WRITTEN[name]
    directory, path = make_written(case, tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    found, wanted = logits(load(path)), logits(expected.eval())
    if "ssm.state_size" in case.metadata:  # decays went through an exponential and back
        assert torch.allclose(found, wanted, rtol=0, atol=1e-3)
    else:
        assert torch.equal(found, wanted)


def test_every_architecture_that_is_read_is_among_the_files() -> None:
    assert {case.architecture for case in WRITTEN.values()} == set(ARCHITECTURES)


def test_the_page_lists_them_all() -> None:
    page = Path(__file__).parents[2] / "docs" / "gguf.md"
    rows = re.findall(r"^\| `([^ ]*)` \| `([^ ]*)`", page.read_text(), re.MULTILINE)
    types = {case.architecture: case.model_type for case in WRITTEN.values()}
    assert [name for name, _ in rows[1:]] == sorted(ARCHITECTURES)
    assert {name for name, model_type in rows[1:] if types.get(name, model_type) != model_type} <= {
        "deepseek2",
        "glm4moe",
        "granite_swa",
        "granitehybrid",
        "granitemoe",  # as what it is served depends on the file
        "llama",
        "olmo2",
    }


class _Model:
    """One of the files, whose keys are read again with other values."""

    def __init__(self, case: Written, folder: Path) -> None:
        self.case = case
        _, self.path = make_written(case, folder)
        tensors = {tensor.name: tensor for tensor in read_header(self.path).tensors}
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self._rope = RopeTensors(
            *(
                unpack(tensors[n]).tolist() if n in tensors else None
                for n in (DIVISORS, LONG, SHORT)
            )
        )
        self.module = load(self.path)
        self.logits = logits(self.module)
        self.fields = self.read(case.metadata)

    def read(self, metadata: dict[str, Any]) -> dict[str, Any]:
        name = self.case.architecture
        stated = {f"{name}.{key}": value for key, value in metadata.items()}
        facts = Facts(Metadata(self.path, name, stated), self._shapes, self._rope)
        facts.fields |= {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None}
        facts.fields["pad_token_id"] = None
        return read_fields(ARCHITECTURES[name], facts)

    def computes_the_same(self, fields: dict[str, Any]) -> bool:
        """Whether a model with these fields and the same weights gives the same logits; not if they
        do not fit, or `transformers` refuses the fields.
        """
        try:
            config = AutoConfig.for_model(**fields)
            module = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
            module.load_state_dict(self.module.state_dict())
            return torch.equal(logits(module), self.logits)
        except Exception:
            return False


@functools.cache
def model(name: str) -> _Model:
    with tempfile.TemporaryDirectory() as folder:
        return _Model(WRITTEN[name], Path(folder))


def known_keys() -> Iterator[str]:
    """Keys of architectures that the package gguf knows, without their names."""
    for group in vars(gguf.constants.Keys).values():
        for value in vars(group).values() if isinstance(group, type) else ():
            if isinstance(value, str) and value.startswith("{arch}."):
                yield value.removeprefix("{arch}.")


def other_values(stated: Any) -> list[Any]:
    """Unusual values of a key, of the type of the stated one."""
    if isinstance(stated, bool):
        return [not stated]
    if isinstance(stated, list):
        return [[not value if isinstance(value, bool) else value + 1 for value in stated]]
    if isinstance(stated, str):
        return ["odd"]
    if isinstance(stated, int | float):
        return [stated * 3, stated + 1, stated / 3 if isinstance(stated, float) else stated // 3]
    return [3, 0.37]


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        list(WRITTEN), but=["llama-yarn", "gpt_oss", "starcoder2", "stablelm", "granite", "lfm2"]
    ),
)
def test_each_key_changes_the_model_or_is_refused_or_known_to_change_nothing(name: str) -> None:
    of, metadata = model(name), WRITTEN[name].metadata
    ignored = {*WITHOUT_EFFECT, *ARCHITECTURES[of.case.architecture].ignored, *LIMITS}
    if metadata.get("rope.scaling.type") != "yarn":
        ignored |= set(OF_STRETCHES) - ({ORIGINAL} if name == "phi3-long" else set())
    ignored |= UNFELT.get(name, set())
    if metadata.get("rope.scaling.type") == "none":
        ignored.add("rope.scaling.factor")

    def has_effect(key: str, value: Any) -> bool:
        try:
            fields = of.read({**metadata, key: value})
        except (ConfigError, TypeError, ValueError):  # the file's reader makes one of them
            return True
        return fields != of.fields and not of.computes_the_same(fields)

    assert not {
        key
        for key in {*known_keys(), *metadata} - ignored
        if not any(has_effect(key, value) for value in other_values(metadata.get(key)))
    }


def test_a_key_that_is_not_read_is_refused_by_name() -> None:
    of = model("llama3")
    with pytest.raises(ConfigError, match=r"m\.gguf: aioserve does not read its logit_scale, with"):
        of.read({**WRITTEN["llama3"].metadata, "logit_scale": 2.0, "expert_count": 0})
    with pytest.raises(ConfigError, match=r"does not read its 'odd\\nkey', without"):
        of.read({**WRITTEN["llama3"].metadata, "odd\nkey": 1})


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("llama3", "attention.layer_norm_rms_epsilon"),
        ("llama3", "block_count"),
        ("gpt_oss", "expert_used_count"),
        ("cohere2", "logit_scale"),
    ],
)
def test_a_key_that_is_needed_has_no_default(name: str, key: str) -> None:
    metadata = {other: value for other, value in WRITTEN[name].metadata.items() if other != key}
    with pytest.raises(ConfigError, match=f"does not say {re.escape(key)}, which its arch"):
        model(name).read(metadata)
