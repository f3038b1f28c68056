"""Puts an application of Ray Serve together from its settings. Knows no request."""

import inspect
import logging
import math
import re
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import (
    AutoscalingConfig,
    AutoscalingContext,
    AutoscalingPolicy,
    RequestRouterConfig,
)

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.fleet.ray.ingress import Ingress
from aioserve.fleet.ray.replica import EngineReplica
from aioserve.fleet.ray.settings import (
    Autoscaling,
    ModelSettings,
    RaySettings,
    ReplicaGroup,
    check_served,
    names_of,
)
from aioserve.model_source.info import ModelInfo


class TokensQueued:
    """Autoscaling policy: enough replicas that none has more prompt tokens in its queue, nor more
    of its KV cache in use, than its target, were both spread evenly.
    """

    def __init__(
        self, target_queued_prompt_tokens: float = 8192.0, target_kv_cache_usage: float = 0.8
    ) -> None:
        """Both are of one replica; the usage is a share, 0 to 1."""
        self._tokens = target_queued_prompt_tokens
        self._usage = target_kv_cache_usage

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the number that is wanted, before Ray's delays and bounds."""
        metrics = context.aggregated_metrics or {}
        tokens = sum(metrics.get("queued_prompt_tokens", {}).values())
        usage = sum(metrics.get("kv_cache_usage", {}).values())
        if not metrics and context.current_num_replicas:
            return context.target_num_replicas, {}  # no replica has reported yet
        wanted = max(tokens / self._tokens, usage / self._usage)
        busy = sum(metrics.get("num_requests", {}).values()) > 0
        return max(math.ceil(wanted), int(busy)), {}


# Puts an application of Ray Serve together from its settings. Knows no request.


logger = logging.getLogger(__name__)


def make_app(args: dict[str, object]) -> Application:
    """Return the Serve application that `args`, a `RaySettings`, describes. Raises
    `ConfigError`.
    """
    settings = RaySettings.of(args)
    models: dict[str, EngineConfig] = {}
    parts: list[Any] = []  # as the ingress takes them
    for model in settings.models:
        config = model.engine_config()
        _check(config)
        name = config.model.served_name
        taken = {own for other in models.values() for own in other.model.served_names}
        for own in taken.intersection(config.model.served_names):
            raise ConfigError(
                f"two models are served as {own!r}: give them a model.served_model_name each"
            )
        models[name] = config
        configs = model.group_configs()
        parts += [config, model, configs, *_deployments(name, model, configs)]
    _warn_of_total(settings)
    ingress = serve.deployment(Ingress).options(
        num_replicas=settings.num_ingress_replicas,
        ray_actor_options=settings.ingress_actor_options,
        max_ongoing_requests=max(model.max_ongoing_requests for model in settings.models),
        graceful_shutdown_timeout_s=max(
            model.graceful_shutdown_timeout_s for model in settings.models
        ),
        **_surge(settings.ingress_max_surge_percent),
    )
    shares_load = settings.num_ingress_replicas > 1
    return ingress.bind(shares_load, *parts)


def _deployments(name: str, model: ModelSettings, configs: list[EngineConfig]) -> list[Application]:
    """Return one for each group of replicas, with its settings."""
    made = []
    groups = model.all_groups
    for group, config, suffix in zip(groups, configs, names_of(groups), strict=True):
        _check(config)
        options = model.ray_actor_options | group.ray_actor_options
        _warn_of_resources(name, options)
        try:
            deployment = _deployment(f"{name}-{suffix}" if suffix else name, model, group, options)
            made.append(deployment.bind(config))
        except (TypeError, ValueError) as error:  # Ray's, of what it was given
            told = " ".join(str(error).split())
            raise ConfigError(f"the deployment of {name!r} cannot be: {told}") from error
    return made


def _deployment(
    name: str, model: ModelSettings, group: ReplicaGroup, options: dict[str, Any]
) -> serve.Deployment:
    deployment = serve.deployment(EngineReplica).options(
        name=f"engine-{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}",
        ray_actor_options=options,
        max_ongoing_requests=model.max_ongoing_requests,
        graceful_shutdown_timeout_s=model.graceful_shutdown_timeout_s,
        health_check_period_s=5.0,
        request_router_config=_router(model),
        **_surge(model.max_surge_percent),
    )
    if group.autoscaling is None:
        return deployment.options(num_replicas=group.least)
    return deployment.options(num_replicas=None, autoscaling_config=_autoscaling(group.autoscaling))


def _surge(percent: int) -> dict[str, int]:
    """Raises `ConfigError` where this Ray replaces replicas in one way only."""
    if not percent:
        return {}
    name = "max_surge_percent"
    if name not in inspect.signature(serve.Deployment.options).parameters:
        raise ConfigError(f"{name} is {percent}, and Ray {ray.__version__} does not know it")
    return {name: percent}


def _router(model: ModelSettings) -> RequestRouterConfig:
    if model.router_class is None:
        return RequestRouterConfig(request_router_class=model.router)
    return RequestRouterConfig(request_router_class="aioserve.fleet.ray.router:AioserveRouter")


def _autoscaling(settings: Autoscaling) -> AutoscalingConfig:
    return AutoscalingConfig(
        min_replicas=settings.min_replicas,
        max_replicas=settings.max_replicas,
        upscale_delay_s=settings.upscale_delay_s,
        downscale_delay_s=settings.downscale_delay_s,
        look_back_period_s=settings.look_back_period_s,
        policy=AutoscalingPolicy(
            policy_function="aioserve.fleet.ray.app:TokensQueued",
            policy_kwargs={
                "target_queued_prompt_tokens": settings.target_queued_prompt_tokens,
                "target_kv_cache_usage": settings.target_kv_cache_usage,
            },
        ),
    )


def _warn_of_resources(name: str, options: dict[str, Any]) -> None:
    """Ray waits for a node that has what a replica needs; one may still join."""
    if not ray.is_initialized():
        return
    needed = _needed(options)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any(all(node.get(key, 0) >= needed[key] for key in needed) for node in nodes):
        return
    logger.warning(
        "a replica of %r needs %s, and no node of this cluster has that: it waits for one that has",
        *(name, _told(needed)),
    )


def _warn_of_total(settings: RaySettings) -> None:
    """Ray lets what does not fit wait without a word; nodes may still join."""
    if not ray.is_initialized():
        return
    total: dict[str, float] = {}
    parts = [(settings.ingress_actor_options, settings.num_ingress_replicas)]
    for model in settings.models:
        for group in model.all_groups:
            parts.append((model.ray_actor_options | group.ray_actor_options, group.least))
    for options, number in parts:
        for key, value in _needed(options).items():
            total[key] = total.get(key, 0) + number * value
    has = ray.cluster_resources()
    if missing := {key: value for key, value in total.items() if value > has.get(key, 0)}:
        logger.warning(
            "the ingress and the replicas need %s together, and this cluster has %s: some wait "
            "until nodes join; num_cpus of ray_actor_options and ingress_actor_options may be less",
            *(_told(missing), _told({key: has.get(key, 0) for key in missing})),
        )


def _needed(options: dict[str, Any]) -> dict[str, float]:
    """Return what an actor with these options takes, by resource."""
    return {
        "CPU": options.get("num_cpus", 1),
        "GPU": options.get("num_gpus") or 0,
        "memory": options.get("memory") or 0,
        **options.get("resources", {}),
    }


def _told(resources: dict[str, float]) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in resources.items() if value) or "none"


def _check(config: EngineConfig) -> None:
    """Raises `ConfigError` for what has no effect behind Ray's proxies."""
    config.check_effects()
    if config.model.model.startswith(("/", ".", "~")):
        try:
            ModelInfo(config.model)
        except ConfigError as error:
            raise ConfigError(
                f"{error}. It is looked for on each node at the same path, also on the one that "
                "builds the application"
            ) from error
    if config.model.skip_tokenizer_init:
        raise ConfigError(
            "skip_tokenizer_init is for Python callers: the ingress needs a tokenizer"
        )
    check_served(config)
