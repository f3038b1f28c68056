"""The files of `configs/`, which come with the package, by name.

Knows where they lie: inside an installed package, or at the top of a clone. Knows nothing of what
is in them.
"""

from pathlib import Path

from aioserve.errors import ConfigError
from aioserve.nearest import did_you_mean
from aioserve.zoo import PREFIX, is_zoo_name

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
    """A bare word is a name, and so is `zoo.srpt`; whatever has a suffix or a folder is a path."""
    name = str(name_or_path)
    if {*"./"} & {*name} and not is_zoo_name(name):
        return Path(name)
    shipped = _shipped(folder)
    if name not in shipped:
        raise ConfigError(
            f"unknown {kind} {name!r}{did_you_mean(name, shipped)}; available: "
            f"{', '.join(sorted(shipped)) or 'none'}; or give a path to a .yaml file"
        )
    return shipped[name]


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
    found = {file.stem: file for file in (_configs() / folder).glob("*.yaml")}
    zoo = () if folder else (_configs() / "zoo").glob("*.yaml")
    return found | {PREFIX + file.stem: file for file in zoo}


def _configs() -> Path:
    installed = HERE / "configs"
    return installed if installed.is_dir() else HERE.parent / "configs"
