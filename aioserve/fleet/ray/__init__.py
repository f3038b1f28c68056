"""aioserve on Ray Serve: replicas of an engine, a router that knows their KV caches, autoscaling.

Needs the extra `ray`; nothing of it is imported before `build_app` is called. See docs/ray.md.
"""

from typing import TYPE_CHECKING, Any

from aioserve.errors import ConfigError

if TYPE_CHECKING:
    from ray.serve import Application


def build_app(config: dict[str, Any]) -> "Application":
    """Return the application that `config`, the `args` of a Serve config file, describes: see
    `aioserve.fleet.ray.settings.RaySettings`. For `serve run` and `ray.serve.run`.

    Raises `ConfigError`.
    """
    try:
        import ray.serve  # noqa: F401 - is it there?
    except ImportError as error:
        raise ConfigError(f"Ray Serve is missing ({error}): pip install 'ray[serve]'") from error
    from aioserve.fleet.ray.app import make_app

    return make_app(config)


__all__ = ["build_app"]
