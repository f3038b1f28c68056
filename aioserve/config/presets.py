"""Settings under which policies admit and preempt as another engine's scheduler does.

The key `like` of a YAML file and the flag `--like` of the lab name the engine. Loaded where one is
named.
"""

from typing import Any

from aioserve.errors import ConfigError

#: The settings under which a policy of aioserve's that decides as another engine's scheduler does
#: gives the steps of that engine, by the engine's name: the value of the key `like` of a file, and
#: of the flag `--like` of the lab. vLLM 0.32 leaves no KV blocks free at admissions, preempts the
#: request that was admitted last, and admits none in a step that has preempted one;
#: tests/vllm/test_like.py compares the times with those of its class.
LIKE: dict[str, tuple[tuple[str, Any], ...]] = {
    "vllm": (
        ("cache.watermark", 0.0),
        ("scheduler.victim", "last_admitted"),
        ("scheduler.admit_beside_preemption", False),
    ),
}


def preset(engine: object, where: str) -> tuple[tuple[str, Any], ...]:
    """Return the settings by an engine's name. Raises `ConfigError` for one without an entry."""
    if not isinstance(engine, str) or engine not in LIKE:
        raise ConfigError(f"{where}: like must be one of {', '.join(LIKE)}, got {engine!r}")
    return LIKE[engine]


def lay_preset(tree: dict[str, Any], where: str) -> None:
    """Take the key `like` out of the settings of `where`, and set what it stands for where they
    state nothing else. Raises `ConfigError` for an engine that has no entry in `LIKE`.
    """
    for dotted, value in preset(tree.pop("like"), where):
        section, leaf = dotted.split(".")
        if isinstance(stated := tree.setdefault(section, {}), dict):
            stated.setdefault(leaf, value)
