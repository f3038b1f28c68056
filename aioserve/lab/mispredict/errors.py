"""Which errors predictions have on a curve: their kind, and their sizes, the smallest first.

Knows how they are written. Predicts nothing.
"""

import msgspec

from aioserve.errors import ConfigError
from aioserve.lab.workloads.predictions import AnyPrediction, parse_prediction

#: By kind: what a size is called, what it is, and whether a greater one is a worse prediction.
KINDS = {
    "lognormal": ("sigma", "standard deviation of the logarithm of predicted over true", True),
    "ranks": ("tau", "Kendall's rank correlation of predicted and true lengths", False),
    "classes": ("accuracy", "share of predictions in the right class", False),
}
DEFAULT = "lognormal:0,0.25,0.5,1,2"


class Errors(msgspec.Struct, frozen=True):
    """One kind of error in several sizes, from good predictions to bad ones."""

    kind: str
    sizes: tuple[float, ...]
    predictions: tuple[AnyPrediction, ...]  # of each size

    @classmethod
    def parse(cls, text: str) -> "Errors":
        """Read `lognormal:0,0.5,1`, `ranks:1,0.5,0` or `classes:64,256:1,0.8`. Raises
        `ConfigError`.
        """
        head, _, written = text.rpartition(":")
        kind = head.partition(":")[0]
        if kind not in KINDS or (kind == "classes") != (":" in head):
            raise ConfigError(
                "errors look like lognormal:0,0.5,1 (sigma), ranks:1,0.5,0 (Kendall's tau) or "
                f"classes:64,256:1,0.8,0.5 (bounds in tokens, accuracy); got {text!r}"
            )
        predictions = {part: parse_prediction(f"{head}:{part}") for part in written.split(",")}
        sizes = sorted((float(part), p) for part, p in predictions.items())
        if not KINDS[kind][2]:
            sizes.reverse()
        return cls(kind, tuple(s for s, _ in sizes), tuple(p for _, p in sizes))
