from typing import Any

import pytest

from aioserve.errors import ConfigError
from aioserve.ray.settings import RaySettings


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "models"),
        ({"models": []}, "models"),
        ({"models": [{"num_replicas": 0}]}, "num_replicas"),
        ({"models": [{"replicas": 2}]}, "replicas"),
        ({"models": [{"router": "best"}]}, "unknown router 'best'"),
        ({"models": [{"autoscaling": {"max_replicas": 1, "min_replicas": 2}}]}, "below"),
        ({"models": [{"autoscaling": {"max_replicas": 2}, "num_replicas": 2}]}, "leave one out"),
    ],
)
def test_settings_that_cannot_work_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RaySettings.of(config)


def test_a_replica_is_set_up_as_a_server_is() -> None:
    settings = RaySettings.of(
        {"models": [{"config": "priority", "settings": {"scheduler.max_num_seqs": 3}}]}
    )
    config = settings.models[0].engine_config()
    assert config.scheduler.policy == "priority"
    assert config.scheduler.max_num_seqs == 3
