"""Policies are found by name, module or file; what is wrong with a name is said."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from aioserve import scheduler
from aioserve.errors import ConfigError, UnknownPolicyError
from aioserve.scheduler import POLICY_API, BaseScheduler, available_policies, load_policy
from aioserve.scheduler.descriptions import OptionField, describe_options
from tests.processes import PATIENCE

POLICY_FILE = """
from aioserve.scheduler import BaseScheduler
class Mine(BaseScheduler):
    def schedule(self):
        return self.new_step().output()
class Unfinished(BaseScheduler):
    pass
"""


def test_the_built_in_policies_are_installed_and_loadable() -> None:
    assert {"chunked_prefill", "fcfs", "priority"} <= available_policies().keys()
    for name in available_policies():
        assert load_policy(name).schedule


@pytest.mark.parametrize(
    ("version", "remedy"), [(POLICY_API + 1, "upgrade aioserve"), (POLICY_API - 1, "CHANGELOG.md")]
)
def test_a_policy_for_another_version_of_the_policy_api_is_refused(
    tmp_path: Path, version: int, remedy: str
) -> None:
    path = tmp_path / "mine.py"
    mine = f"    policy_api = {version}\n    def schedule"
    path.write_text(POLICY_FILE.replace("    def schedule", mine, 1))
    with pytest.raises(ConfigError, match=rf"version {version} of the policy API.*{remedy}"):
        load_policy(f"{path}:Mine")


def test_the_names_that_policies_import_are_those_that_are_promised() -> None:
    """A name may come; one that goes raises POLICY_API, after a version in which it warned."""
    assert set(scheduler.__all__) >= {
        *("BaseScheduler", "CachedRequestData", "EngineCoreOutputs", "FAILURES_UNTIL_FALLBACK"),
        *("FALLBACK_POLICY", "ModelRunnerOutput", "NewRequestData", "NonNegativeFloat"),
        *("OnlineStepTime", "POLICY_API", "PolicyOptions", "PositiveFloat", "PositiveInt"),
        *("Request", "RequestQueue", "RequestStatus", "SchedulerInterface", "SchedulerOutput"),
        *("Step", "WaitReason", "available_policies", "load_policy", "make_successor"),
    }


def test_a_policy_can_be_a_module_and_class() -> None:
    assert load_policy("aioserve.policies.fcfs:FCFSScheduler") is load_policy("fcfs")


def test_the_scheduler_of_another_engine_is_in_no_list_and_names_the_package_that_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "vllm.config", None)  # as where it is not installed
    monkeypatch.delitem(sys.modules, "aioserve.vllm.foreign", raising=False)
    assert "vllm" not in available_policies()
    with pytest.raises(ConfigError, match=r"^the scheduler vllm needs vLLM .*: pip install vllm"):
        load_policy("vllm")


def test_a_policy_can_be_a_file_and_class(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(POLICY_FILE)
    assert load_policy(f"{path}:Mine").__name__ == "Mine"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "fcsf",
            r"unknown policy 'fcsf' \(did you mean 'fcfs'\?\); available: .*; or give package.mod",
        ),
        ("zoo.srtp", r"unknown policy 'zoo.srtp' \(did you mean 'zoo.srpt'\?\); available: "),
        ("srpt", r"unknown policy 'srpt' \(did you mean 'zoo.srpt'\?\)"),
        ("unlike", "unknown policy 'unlike'; available: "),
        ("aioserve.policies.fcfs:Nope", "no 'Nope' in aioserve.policies.fcfs"),
        ("aioserve.policies.nope:Nope", "no module named 'aioserve.policies.nope'"),
        ("nowhere/file.py:Class", "no file nowhere/file.py"),
    ],
)
def test_an_unknown_policy_is_named(spec: str, message: str) -> None:
    with pytest.raises(UnknownPolicyError, match=message):
        load_policy(spec)


def test_a_class_that_is_no_scheduler_or_not_finished_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(POLICY_FILE)
    with pytest.raises(ConfigError, match="not a SchedulerInterface"):
        load_policy("pathlib:Path")
    with pytest.raises(ConfigError, match="does not implement schedule"):
        load_policy(f"{path}:Unfinished")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("\nimport nowhere", "mine.py:2: .* ModuleNotFoundError: No module named 'nowhere'"),
        ("x = 1\ndef f(:\n", "mine.py:2: cannot import the policy: SyntaxError: invalid syntax"),
        ("\n\n1 / 0", "mine.py:3: .* ZeroDivisionError: division by zero"),
        ("raise ValueError('two\\nlines')", "mine.py:1: .* ValueError: two lines"),
    ],
)
def test_an_error_in_a_policys_file_is_one_line_with_file_and_line(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    for spec in ("mine.py:Mine", "mine:Mine"):
        with pytest.raises(ConfigError, match=message) as caught:
            load_policy(spec)
        assert "\n" not in str(caught.value)
        assert caught.value.__cause__ is not None


def test_a_file_without_a_class_means_the_only_policy_in_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(POLICY_FILE)  # one of its classes is finished
    assert load_policy(str(path)).__name__ == "Mine"
    path.write_text(POLICY_FILE + "class Other(Mine): pass\n")
    with pytest.raises(ConfigError, match=r"say which, one of .*mine.py:Mine, .*mine.py:Other"):
        load_policy(str(path))
    path.write_text("from aioserve.policies.fcfs import FCFSScheduler\n")
    with pytest.raises(ConfigError, match="defines no policy: derive a class from BaseScheduler"):
        load_policy(str(path))
    assert load_policy("aioserve.policies.fcfs") is load_policy("fcfs")


def test_a_misspelt_class_is_named_with_the_one_that_was_meant(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(POLICY_FILE)
    with pytest.raises(UnknownPolicyError, match=r"no 'Mien' in .*mine.py \(did you mean 'Mine'\?"):
        load_policy(f"{path}:Mien")


def test_an_edited_file_is_read_again(tmp_path: Path) -> None:
    """Even within the grain of a file's time, and with as many characters as before."""
    path = tmp_path / "mine.py"
    for number in range(3):
        path.write_text(f"{POLICY_FILE}Mine.number = {number}\n")
        assert vars(load_policy(f"{path}:Mine"))["number"] == number


def test_options_are_read_from_sources_as_the_classes_have_them() -> None:
    described = describe_options()
    assert described.keys() == available_policies().keys()
    assert described["fcfs"] == []
    assert described["chunked_prefill"] == [
        OptionField("chunk_size", 512, "tokens per step, decodes included")
    ]
    for name, fields in described.items():
        policy = load_policy(name)
        assert issubclass(policy, BaseScheduler)
        options = msgspec.to_builtins(policy.parse_options({}))
        assert {field.name: field.default for field in fields} == options, name


def test_policies_are_described_without_being_imported() -> None:
    code = (
        "import sys; from aioserve.scheduler.descriptions import describe_policies;"
        "print(describe_policies()['fcfs']);"
        "print({name for name in sys.modules if name.startswith('aioserve.policies.')})"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert (
        result.stdout
        == "Running requests, then whole prompts while they fit.\n{'aioserve.policies.zoo'}\n"
    )


def test_policies_are_described_for_several_threads_at_once() -> None:
    """Python 3.11 hands on from one thread to another in the midst of a tree that it makes, where
    the garbage collector calls some Python, and the other's tree then counts as part of it.
    """
    script = (
        "import gc, sys\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from aioserve.scheduler.descriptions import describe_policies\n"
        "sys.setswitchinterval(1e-5)\n"
        "gc.set_threshold(50)\n"
        "gc.callbacks.append(lambda *_: [None for _ in range(100)])\n"
        "with ThreadPoolExecutor(4) as pool:\n"
        "    found = list(pool.map(lambda _: describe_policies(), range(12)))\n"
        "assert found == found[:1] * 12\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE)
