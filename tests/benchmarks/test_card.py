"""The check of a first card finds nothing on a sound stand-in, and tells each planted fault."""

import json
from pathlib import Path
from typing import Any

import pytest
from card import RESULTS, STAGES, STAND_IN, Found, chosen, markdown, read_results, run_stages, table

from tests.slow import mostly_slow

STAND_INS = STAND_IN.partition(":")[0]

pytestmark = pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="processes are forked and stopped as on Linux"
)


def examine(folder: Path, stage: str, stand_in: str, patience: float = 4.0) -> Found:
    """Run one stage. Its limits are longer than a card's, since this machine may be busy."""
    run_stages([stage], folder, f"{STAND_INS}:{stand_in}", patience)
    return next(found for found in read_results(folder) if found.stage == stage)


def wrong_parts(found: Found) -> set[str]:
    return {name for name, line in found.parts.items() if "error" in line}


#: All stages but the longest. Three of its models tests/gpu/test_models.py asks the same of in
#: `make test`.
SHORT = [name for name in STAGES if name != "models"]


@pytest.mark.parametrize("names", mostly_slow([SHORT, list(STAGES)], but=[SHORT]))
def test_stages_pass_on_a_sound_stand_in(names: list[str], tmp_path: Path) -> None:
    run_stages(names, tmp_path, STAND_IN, patience=4.0)
    found = [each for each in read_results(tmp_path) if each.result != "not run"]
    assert [(each.stage, each.result, each.why) for each in found] == [
        (name, "passed", []) for name in names
    ]
    assert all(line.get("found") is not None for each in found for line in each.parts.values())
    block = markdown(found)
    assert "Card, date, versions: a fake device, " in block
    assert "| overlap | passed | 3 of 3 |  |" in block
    assert "| speed | decode 4, sampled | ms " in block
    assert "| speed | W5, sampled | tokens/s " in block


def test_a_crash_of_the_process_costs_the_part_in_which_it_happens(tmp_path: Path) -> None:
    found = examine(tmp_path, "sampler", "CrashingDraw")
    assert found.result == "failed"
    assert wrong_parts(found) == {name for name in found.parts if "top-k" in name}
    assert len(found.parts) == 11
    told = table([found])
    assert "top-k: frequencies: the process died of SIGSEGV; it stood at File " in told
    assert "card_stand_ins.py, line " in told


def test_a_hang_is_stopped_and_told_with_the_line_in_which_it_is(tmp_path: Path) -> None:
    found = examine(tmp_path, "sampler", "HangingDraw", patience=0.25)
    assert found.result == "failed"
    assert "min-p: the tokens of the CPU" in wrong_parts(found)
    assert not {name for name in wrong_parts(found) if not name.startswith("min-p")}
    assert "the process hung and was stopped after 6 s; it stood at File tests/" in table([found])
    assert "card_stand_ins.py, line " in table([found])


#: Stage, stand-in, words of the parts that fail (and of no other), what the table says.
FAULTS = [
    ("versions", "WithoutTriton", "triton", "triton: ModuleNotFoundError: import of triton halted"),
    ("kernels", "WithoutCompiler", "window", "RuntimeError: Could not find nvcc and default cuda"),
    ("attention", "WrongKernel", "heads of 64", "wrong numbers: the worst head is off by "),
    ("attention", "SilentKernel", "28/4 heads", "wrong numbers: the worst head is off by "),
    ("attention", "WithoutSinks", "sinks", "wrong numbers: the worst head is off by "),
    ("attention", "UnturnedLatents", "latent", "wrong numbers: the worst head is off by "),
    ("attention", "WrongScale", "32/32 heads", "wrong numbers: the worst head is off by "),
    ("graphs", "StalePlan", "", "wrong numbers: the worst head is off by "),
    ("sampler", "WithoutTopP", "top-p", "draws are outside of top-p"),
    ("overlap", "UnguardedPlan", "depth 2, with graphs", "copies of this buffer are still queued"),
    ("overlap", "WrongPages", "log probabilities", "wrong numbers: log probabilities are off by "),
    ("overlap", "RacingPlan", "log probabilities", "wrong numbers: log probabilities are off by "),
    ("models", "EndlessWindows", "windows", "wrong numbers: log probabilities are off by "),
    ("speed", "LittleMemory", "decode 4", "OutOfMemoryError: CUDA out of memory. Tried to alloc"),
    ("speed", "WithoutGraphs", "load", "it works, but warns: decode steps run without CUDA graphs"),
    ("host", "WaitingLaunch", "waiting", "RuntimeError: called a synchronizing CUDA operation"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "stand_in", "parts", "told"), FAULTS)
def test_a_planted_fault_is_told_in_words(
    stage: str, stand_in: str, parts: str, told: str, tmp_path: Path
) -> None:
    found = examine(tmp_path, stage, stand_in)
    assert found.result == "failed"
    assert wrong_parts(found) == {name for name in found.parts if parts in name}
    assert told in table([found])
    assert told in markdown([*read_results(tmp_path)])


@pytest.mark.slow
def test_the_hosts_time_is_told_with_a_card_that_does_nothing(tmp_path: Path) -> None:
    run_stages(["host"], tmp_path, "idle_card:IdleCard", patience=4.0)
    found = read_results(tmp_path)[-1]
    assert (found.result, found.why) == ("passed", [])
    assert found.parts["256 streams, sampled"]["found"]["launch us"] > 0
    assert any("plan_step" in name for name in found.parts["256 streams, profile"]["found"])
    assert "versions" not in markdown(read_results(tmp_path)).partition("\n")[2]


@pytest.mark.slow
def test_kernels_of_every_model_of_the_stages_are_among_the_kinds() -> None:
    """Else a stage would compile, or take plain torch, where kernels are packed."""
    import torch
    from card_models import CASES
    from card_stages import FP8, HOST_SHAPE, KINDS, OVERLAP_SHAPE, REAL
    from make_model import SHAPES

    def kernel(
        fields: Any, window: Any = None, softcap: Any = None, kv_dtype: Any = torch.bfloat16
    ) -> tuple[Any, ...]:
        group = fields["num_attention_heads"] // fields["num_key_value_heads"]
        return fields["head_dim"], group >= 4, bool(window), bool(softcap), kv_dtype

    packed = set()
    for kind in KINDS:
        if kind.has_sinks or kind.rope_dim:
            continue  # which none of these models have
        names = ("num_attention_heads", "num_key_value_heads", "head_dim")
        fields = dict(zip(names, (kind.num_heads, kind.num_kv_heads, kind.head_dim), strict=True))
        packed.add(kernel(fields, kind.window, kind.softcap, kind.kv_dtype))
    for shape in (OVERLAP_SHAPE, SHAPES[REAL.shape], SHAPES[HOST_SHAPE]):
        assert kernel(shape) in packed
    for case in CASES:
        fields = case.fields.get("text_config", case.fields)  # of a model that sees
        window, softcap = (
            fields.get(name) for name in ("sliding_window", "attn_logit_softcapping")
        )
        kv_dtype = FP8 if case.kv_cache_dtype == "fp8" else torch.bfloat16
        for own in {window, None}:  # such a model has full layers besides
            assert kernel(fields, own, softcap, kv_dtype) in packed


def test_every_stage_has_a_planted_fault() -> None:
    assert {stage for stage, *_ in FAULTS} == set(STAGES)


def test_all_limits_together_are_less_than_nine_minutes_and_each_half_less_than_four() -> None:
    assert sum(stage.limit for stage in STAGES.values()) < 480
    for half in ("..sampler", "overlap.."):
        assert sum(STAGES[name].limit for name in chosen(half)) < 240


def test_an_interrupted_stage_is_told_and_a_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    lines = [
        {"stage": "versions", "begin": "torch", "is_setup": False},
        {"stage": "versions", "part": "torch", "found": {"torch": "2"}},
        {"stage": "versions", "begin": "card", "is_setup": False},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / RESULTS).write_text(text + '{"stage": "vers')
    found = read_results(tmp_path)
    assert found[0].result == "interrupted"
    assert found[0].why == ["it was interrupted in card"]
    assert {each.result for each in found[1:]} == {"not run"}


def test_stages_are_chosen_by_range_or_by_name() -> None:
    assert chosen("..") == list(STAGES)
    assert chosen("graphs..overlap") == ["graphs", "sampler", "overlap"]
    assert chosen("host,versions") == ["host", "versions"]
    with pytest.raises(ValueError, match="there is no stage 'spead': the stages are versions, "):
        chosen("versions..spead")
