"""Draft models on a device: they change when tokens come, never which."""

from functools import partial

import pytest

from aioserve.config import SpeculationConfig
from aioserve.features.spec_decode.model_drafter import ModelDraftLength
from tests.engine.test_speculation import NONE, check_equal, generate
from tests.runner.cuda.fake_device import FakeDevice
from tests.runner.cuda.on_device import make_device_runner

# The loop is the subject of other tests; these load two models each.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

ITSELF = SpeculationConfig(speculative_method="draft", draft_model="embedded")


@pytest.mark.slow
async def test_a_draft_model_on_a_device_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """With prompts in pieces, preemptions, cached prefixes, stop strings, log probabilities and
    grammars. Where both models are the same, all but near ties are right: what one has read, the
    other has too.
    """

    def stepped(self: ModelDraftLength, num_rows: int, num_tokens: int, seconds: float) -> None:
        self.price = 1e-6  # every draft pays, however busy this machine is

    monkeypatch.setattr(ModelDraftLength, "stepped", stepped)
    plain, _ = await generate(NONE)
    guessed, stats = await generate(
        ITSELF,
        make_runner=partial(make_device_runner, device=FakeDevice(1, eagerness=0.5)),
        pipeline_depth=1,
        max_num_batched_tokens=48,
    )
    check_equal(guessed, plain)
    assert stats.num_preemptions
    assert stats.num_draft_tokens > 300
    assert stats.num_accepted_tokens >= 0.99 * stats.num_draft_tokens
