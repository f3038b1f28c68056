"""The files of `configs/`, which come with the package, by name.

Knows where they lie: inside an installed package, or at the top of a clone. Knows nothing of what
is in them.
"""

from pathlib import Path

from aioserve.errors import ConfigError
from aioserve.nearest import did_you_mean

HERE = Path(__file__).parent


def find_config(name_or_path: str | Path) -> Path:
    """A YAML file of settings. Raises `ConfigError` that lists the names that there are."""
    return _find(name_or_path, "config", "")


def find_workload(name_or_path: str | Path) -> Path:
    """A description of a workload, or a trace. Raises `ConfigError` as above."""
    return _find(name_or_path, "workload", "workloads")


def find_fleet(name_or_path: str | Path) -> Path:
    """A description of a fleet. Raises `ConfigError` as above."""
    return _find(name_or_path, "fleet", "fleets")


def _find(name_or_path: str | Path, kind: str, folder: str) -> Path:
    """A bare word is a name; whatever has a suffix or a folder is a path."""
    path = Path(name_or_path)
    if path.suffix or len(path.parts) != 1 or "/" in str(name_or_path):
        return path
    shipped = _shipped(folder)
    if path.name not in shipped:
        meant = did_you_mean(path.name, shipped)
        raise ConfigError(
            f"unknown {kind} {path.name!r}{meant}; available: "
            f"{', '.join(sorted(shipped)) or 'none'}; or give a path to a .yaml file"
        )
    return shipped[path.name]


def config_names() -> set[str]:
    """Of the files of settings that come with the package."""
    return set(_shipped(""))


def workload_names() -> set[str]:
    """Of the workloads that do."""
    return set(_shipped("workloads"))


def fleet_names() -> set[str]:
    """Of the fleets that do."""
    return set(_shipped("fleets"))


def _shipped(folder: str) -> dict[str, Path]:
    return {file.stem: file for file in (_configs() / folder).glob("*.yaml")}


def _configs() -> Path:
    installed = HERE / "configs"
    return installed if installed.is_dir() else HERE.parent / "configs"
