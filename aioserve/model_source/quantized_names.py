"""The names that tensors of files have in a module of `transformers`, which renames and joins some.

Knows what `transformers` declares of a model; reads no tensor.
"""

from typing import Any


class ModuleNames:
    """The names of parameters of one module, by those in files."""

    def __init__(self, module: Any) -> None:
        """`module` may be an outline without numbers."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        transforms = get_model_conversion_mapping(module)
        self._joining = [one for one in transforms if isinstance(one, WeightConverter)]
        self._renaming = [one for one in transforms if not isinstance(one, WeightConverter)]
        self._prefix, self._known = module.base_model_prefix, module.state_dict()

    def find(self, name: str) -> str | None:
        """The parameter that the tensor `name` of a file is; None where it becomes another."""
        from transformers.core_model_loading import rename_source_key

        found, joined = rename_source_key(
            name, self._renaming, self._joining, self._prefix, self._known
        )
        return found if joined is None else None
