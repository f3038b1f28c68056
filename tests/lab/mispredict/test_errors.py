"""Errors of predictions are read from the command line, in order from good to bad."""

import pytest

from aioserve.errors import ConfigError
from aioserve.lab.mispredict import DEFAULT, Errors
from aioserve.lab.workloads.synthetic import Classes, LogNormalError, Ranks


def test_sizes_come_in_order_from_the_best_prediction_to_the_worst() -> None:
    assert Errors.parse("lognormal:2,0,0.5").sizes == (0, 0.5, 2)
    assert Errors.parse("ranks:0,1,0.5").sizes == (1, 0.5, 0)
    assert Errors.parse("classes:64,256:0.5,1").sizes == (1, 0.5)
    assert Errors.parse(DEFAULT).sizes[0] == 0


def test_each_size_has_its_prediction() -> None:
    assert Errors.parse("lognormal:0,1").predictions[1] == LogNormalError(sigma=1)
    assert Errors.parse("ranks:0.5").predictions == (Ranks(tau=0.5),)
    bounds = (64, 256)
    assert Errors.parse("classes:64,256:1,0.8").predictions == (
        Classes(bounds=bounds, accuracy=1),
        Classes(bounds=bounds, accuracy=0.8),
    )


@pytest.mark.parametrize(
    "text",
    ["", "0,1", "lognormal", "lognormal:", "lognormal:-1", "exact:1", "classes:64,256", "ranks:2"],
)
def test_errors_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Errors.parse(text)
