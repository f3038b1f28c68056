"""What is loaded to serve stays within its limits, which are raised only with a reason."""

import pytest

from tests.size import LIMITS, ROOT, SLACK, loaded_files, loaded_packages, measure


@pytest.mark.parametrize("scenario", LIMITS)
def test_a_scenario_loads_no_more_than_its_limit_and_the_slack(scenario: str) -> None:
    found, limit = measure(scenario), LIMITS[scenario]
    assert found.modules <= limit.modules
    assert found.lines <= limit.lines + SLACK


def test_a_simulation_loads_neither_torch_nor_transformers() -> None:
    found = loaded_packages("compare fcfs chunked_prefill")
    assert "aioserve" in found
    assert found & {"torch", "transformers"} == set()


def test_a_simulation_loads_nothing_of_text_logs_or_real_time() -> None:
    package = ROOT / "aioserve"
    found = {str(path) for path in loaded_files("compare fcfs chunked_prefill")}
    assert str(package / "engine/output_processor.py") in found
    unused = "cli/serve engine/detokenizer engine/watchdog support/logs support/progress"
    assert found & {str(package / f"{name}.py") for name in unused.split()} == set()


@pytest.mark.parametrize(
    "scenario",
    ["an embedded engine, one text prompt", "the server, one streamed chat completion"],
)
def test_a_later_start_loads_no_transformers(scenario: str) -> None:
    found = loaded_packages(scenario)
    assert "tokenizers" in found
    assert "transformers" not in found


def test_a_streamed_chat_loads_nothing_of_logprobs_bound_replies_or_yaml() -> None:
    package = ROOT / "aioserve"
    found = {str(path) for path in loaded_files("the server, one streamed chat completion")}
    assert str(package / "engine/chat/reply_format.py") in found
    unused = "engine/chat/reply_grammar server/logprobs support/files"
    assert found & {str(package / f"{name}.py") for name in unused.split()} == set()


def names_of_a_text_prompt() -> set[str]:
    """Files under aioserve that one text prompt loads in an embedded engine."""
    package = ROOT / "aioserve"
    found = loaded_files("an embedded engine, one text prompt")
    return {str(path.relative_to(package)) for path in found if path.is_relative_to(package)}


def test_a_text_prompt_loads_no_feature_that_it_does_not_ask_for() -> None:
    """What is checked at the start whatever the model is named here; this list only shrinks."""
    found = {name for name in names_of_a_text_prompt() if name.startswith("features/")}
    assert {name for name in found if not name.endswith("/__init__.py")} <= {
        "features/grammars/compiler.py",
        "features/grammars/tokenizer.py",
        "features/multimodal/families.py",
        "features/spec_decode/draft_length.py",  # drafts are made unless told otherwise
        "features/spec_decode/ngram.py",
    }


def test_a_text_prompt_loads_no_other_part() -> None:
    folders = {name.partition("/")[0] for name in names_of_a_text_prompt()}
    assert folders & {"apis", "cli", "fleet", "gpu", "lab", "server", "testing"} == set()


def test_a_text_prompt_loads_no_part_of_the_runner_that_it_does_not_ask_for() -> None:
    names = {name for name in names_of_a_text_prompt() if name.startswith("runner/")}
    assert "runner/batch/input_batch.py" in names
    folders = {name.split("/")[1] for name in names if name.count("/") > 1}
    assert folders == {"attention", "batch", "cpu", "fused"}
    asked_for = "batch/prompt_rows batch/rescue cpu/asked_results cpu/experts fused/fuse"
    asked_for += " fused/recognize batch/logits_edits cpu/draws"
    assert names & {f"runner/{name}.py" for name in asked_for.split()} == set()


def test_a_text_prompt_loads_no_part_of_the_engine_that_it_does_not_ask_for() -> None:
    names = {name for name in names_of_a_text_prompt() if name.startswith("engine/")}
    assert "engine/input_processor.py" in names
    asked_for = "live_feed policy_trials tracing request_log control snapshot kv_events"
    asked_for += " chat_template template_renderer template_process"
    assert names & {f"engine/{name}.py" for name in asked_for.split()} == set()
