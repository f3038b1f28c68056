"""Adapters on modules of `transformers` as they are, by hooks on those that can have them.

A module can if every token of a step passes through it once, in a row of its own: what a router
sends to an expert is another's rows. Knows modules; knows nothing about files.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from aioserve.gpu.tensor_parallel.shard import share_of
from aioserve.runner.adapters import AdapterHooks, AdapterSites, Site, TokenAdapters
from aioserve.runner.served_model import LayerStates


class HookedAdapters(AdapterHooks):
    """The adapters of one model, by hooks. A step says first what it is computed with."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._head = module.get_output_embeddings()  # type: ignore[operator]
        self._tokens: TokenAdapters | None = None  # of what passes through all but the head
        self._sampling: TokenAdapters | None = None  # of what passes through that
        self._names: dict[str, nn.Linear] = {}
        self._table: tuple[str, nn.Embedding] | None = None

    @contextmanager
    def finding(self, num_tokens: int, states: LayerStates | None = None) -> Iterator[None]:
        handles = []
        for name, module in self._module.named_modules():
            if isinstance(module, nn.Linear) and (states is None or module not in states):
                handles.append(module.register_forward_hook(self._seen(name, num_tokens)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        table = self._module.get_input_embeddings()  # type: ignore[operator]
        for name, module in self._module.named_modules():
            if module is table and type(module) is nn.Embedding:  # a subclass may scale
                self._table = (name, module)
                module.register_forward_hook(self._embed)
        for name, module in self._names.items():
            # First: ranks put their parts of an output together by a hook of their own.
            hook = self._adapted(name, module is self._head)
            module.register_forward_hook(hook, prepend=True)

    @contextmanager
    def used(self, tokens: TokenAdapters | None, sampling: TokenAdapters | None) -> Iterator[None]:
        self._tokens, self._sampling = tokens, sampling
        try:
            yield
        finally:
            self._tokens = self._sampling = None

    def sites(self, head: Callable[[Tensor], Tensor]) -> AdapterSites:
        weight = next(self._module.parameters())
        table, shape = self._table, None
        if table is not None:
            shape = (table[1].num_embeddings, table[1].embedding_dim)

        # A part of a larger model has names that it had there.
        own_name: Callable[[str], str] = getattr(self._module, "own_name", str)

        def find(name: str) -> Site | None:
            name = own_name(name)
            module = self._names.get(name)
            if module is None:
                return None
            return Site(name, 0, *share_of(module))

        return AdapterSites(
            find=find,
            dtype=weight.dtype,
            device=weight.device,
            table_shape=shape,
            # `forward`, as for the head
            rows_of_table=lambda ids: table[1].forward(ids) if table is not None else ids,
            head=head,
            is_table=lambda name: table is not None and own_name(name) == table[0],
        )

    def _seen(self, name: str, num_tokens: int) -> Callable[..., None]:
        def note(module: nn.Linear, args: tuple[Any, ...], _: Any) -> None:
            if args and tuple(args[0].shape) == (1, num_tokens, module.in_features):
                self._names[name] = module

        return note

    def _adapted(self, name: str, is_head: bool) -> Callable[..., None]:
        def add(_: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            adapters = self._sampling if is_head else self._tokens
            if adapters is not None:
                adapters.add(name, args[0][0], out[0])

        return add

    def _embed(self, _: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        if self._tokens is not None:
            self._tokens.embed(args[0][0], out[0])
