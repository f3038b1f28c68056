"""What is loaded to serve stays within its limits, which are only ever lowered."""

import pytest

from tests.size import LIMITS, ROOT, loaded_files, measure


@pytest.mark.parametrize("scenario", LIMITS)
def test_a_scenario_loads_no_more_than_its_limit(scenario: str) -> None:
    found, limit = measure(scenario), LIMITS[scenario]
    assert found.modules <= limit.modules
    assert found.lines <= limit.lines


def test_a_text_prompt_loads_no_part_of_the_runner_that_it_does_not_ask_for() -> None:
    runner = ROOT / "aioserve/runner"
    found = loaded_files("an embedded engine, one text prompt")
    names = {str(path.relative_to(runner)) for path in found if path.is_relative_to(runner)}
    assert "batch/input_batch.py" in names
    folders = {name.partition("/")[0] for name in names if "/" in name}
    assert folders == {"attention", "batch", "cpu", "fused"}
    assert (
        names
        & {
            "adapters.py",
            "host_blocks.py",
            "batch/adapter_rows.py",
            "batch/grammar_rows.py",
            "batch/prompt_rows.py",
            "batch/state_rows.py",
            "batch/thinking_rows.py",
            "cpu/asked_results.py",
            "cpu/beside_blocks.py",
            "cpu/experts.py",
            "cpu/host_copies.py",
            "cpu/low_rank.py",
            "cpu/state_steps.py",
            "fused/fuse.py",
            "fused/recognize.py",
        }
        == set()
    )


def test_a_text_prompt_loads_no_part_of_the_engine_that_it_does_not_ask_for() -> None:
    found = loaded_files("an embedded engine, one text prompt")
    names = {path.stem for path in found if path.parent == ROOT / "aioserve/engine"}
    assert "input_processor" in names
    asked_for = "live_feed shadow policy_trials tracing request_log control snapshot kv_events"
    asked_for += " kv_connector multimodal_prompts chat_template template_renderer template_process"
    assert names & set(asked_for.split()) == set()


def test_a_text_prompt_loads_no_other_kind_of_model_and_no_log() -> None:
    """No GGUF, quantized checkpoint, adapter or download; no decision log, worker or format."""
    found = loaded_files("an embedded engine, one text prompt")
    package = ROOT / "aioserve"
    names = {str(path.relative_to(package)) for path in found if path.is_relative_to(package)}
    sources = {name for name in names if name.startswith("model_source/")}
    kinds = {"__init__", "directory", "quantized", "source", "stated_values"}
    assert sources <= {f"model_source/{kind}.py" for kind in kinds}
    folders = {name.partition("/")[0] for name in names}
    assert folders & {"decision_log", "workers", "formats", "testing", "child", "ray"} == set()
