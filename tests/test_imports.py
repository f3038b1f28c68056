"""Who may import whom. The arrows point one way, and nothing heavy is loaded before it is used."""

import ast
import functools
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What a package's modules may import at module level, besides the standard library, third parties
# and their own package. Imports inside functions are choices made at run time; TYPE_CHECKING too.
ALLOWED = {
    "aioserve.errors": set(),
    "aioserve.version": set(),
    "aioserve.structured_outputs": {"aioserve.errors"},
    "aioserve.finite_schema": set(),
    "aioserve.thinking_budget": {"aioserve.errors"},
    "aioserve.byte_alphabet": set(),
    "aioserve.token_bytes": {"aioserve.byte_alphabet"},
    "aioserve.reasoning_tokens": set(),
    "aioserve.sampling_params": {
        "aioserve.errors",
        "aioserve.structured_outputs",
        "aioserve.thinking_budget",
    },
    "aioserve.sampling_defaults": {"aioserve.errors", "aioserve.sampling_params"},
    "aioserve.hints": {"aioserve.errors"},
    "aioserve.row_values": {"aioserve.errors"},
    "aioserve.pooling_params": {"aioserve.errors", "aioserve.sampling_params"},
    "aioserve.formats": {
        "aioserve.errors",
        "aioserve.installed",
        "aioserve.named_class",
        "aioserve.nearest",
    },
    "aioserve.grammars": {
        "aioserve.byte_alphabet",
        "aioserve.errors",
        "aioserve.finite_schema",
        "aioserve.model_info",
        "aioserve.structured_outputs",
        "aioserve.token_bytes",
    },
    "aioserve.nearest": set(),
    "aioserve.named_module": {"aioserve.errors"},
    "aioserve.named_class": {"aioserve.errors", "aioserve.named_module", "aioserve.nearest"},
    "aioserve.installed": {"aioserve.errors"},
    "aioserve.zoo": {"aioserve.installed"},
    "aioserve.progress": set(),
    "aioserve.background_writer": set(),
    "aioserve.process_start": set(),
    "aioserve.log_format": {"aioserve.background_writer", "aioserve.progress"},
    "aioserve.shipped": {"aioserve.errors", "aioserve.nearest", "aioserve.zoo"},
    "aioserve.yaml_file": {"aioserve.errors", "aioserve.nearest"},
    "aioserve.config": {
        "aioserve.errors",
        "aioserve.nearest",
        "aioserve.shipped",
        "aioserve.yaml_file",
    },
    "aioserve.outputs": set(),
    "aioserve.model_source": {
        "aioserve.arguments",
        "aioserve.errors",
        "aioserve.sampling_defaults",
    },
    "aioserve.model_info": {
        "aioserve.config",
        "aioserve.errors",
        "aioserve.model_source",
        "aioserve.model_source.downloads",
        "aioserve.model_source.source",
        "aioserve.progress",
        "aioserve.sampling_defaults",
    },
    "aioserve.request": {
        "aioserve.hints",
        "aioserve.errors",
        "aioserve.outputs",
        "aioserve.pooling_params",
        "aioserve.row_values",
        "aioserve.sampling_params",
    },
    "aioserve.multimodal": {
        "aioserve.errors",
        "aioserve.model_info",
        "aioserve.model_source.source",
        "aioserve.request",
        "aioserve.version",
    },
    "aioserve.kv_cache": {"aioserve.errors", "aioserve.request"},
    "aioserve.option_struct": {"aioserve.errors", "aioserve.nearest"},
    "aioserve.routing": {
        "aioserve.errors",
        "aioserve.hints",
        "aioserve.installed",
        "aioserve.kv_cache.block_pool",
        "aioserve.named_class",
        "aioserve.option_struct",
    },
    "aioserve.routers": {"aioserve.routing"},
    "aioserve.autoscalers": {"aioserve.routing"},
    "aioserve.kv_connector": {"aioserve.errors", "aioserve.kv_cache", "aioserve.request"},
    "aioserve.scheduler": {
        "aioserve.row_values",
        "aioserve.config",
        "aioserve.errors",
        "aioserve.hints",
        "aioserve.installed",
        "aioserve.kv_cache",
        "aioserve.named_class",
        "aioserve.named_module",
        "aioserve.nearest",
        "aioserve.option_struct",
        "aioserve.zoo",
        "aioserve.outputs",
        "aioserve.pooling_params",
        "aioserve.request",
        "aioserve.sampling_params",
    },
    "aioserve.kernels": {"aioserve.errors"},
    "aioserve.runner": {
        "aioserve.row_values",
        "aioserve.kv_connector",
        "aioserve.kv_cache",
        "aioserve.config",
        "aioserve.errors",
        "aioserve.kernels",
        "aioserve.kernels.cpu",
        "aioserve.kernels.state_steps",
        "aioserve.kernels.structs",
        "aioserve.log_format",
        "aioserve.model_info",
        "aioserve.model_source.adapter",
        "aioserve.model_source.quantized",
        "aioserve.model_source.quantized_modules",
        "aioserve.model_source.source",
        "aioserve.multimodal.families",
        "aioserve.nearest",
        "aioserve.outputs",
        "aioserve.pooling_params",
        "aioserve.progress",
        "aioserve.request",
        "aioserve.sampling_params",
        "aioserve.scheduler.output",
        "aioserve.yaml_file",
        "aioserve.reasoning_tokens",
        "aioserve.structured_outputs",
        "aioserve.grammars",
    },
    "aioserve.step_loop": {
        "aioserve.config",
        "aioserve.errors",
        "aioserve.outputs",
        "aioserve.request",
        "aioserve.scheduler",
        "aioserve.scheduler.blame",
    },
    "aioserve.decision_log": {
        "aioserve.background_writer",
        "aioserve.output_file",
        "aioserve.step_loop",
        "aioserve.config",
        "aioserve.errors",
        "aioserve.kv_cache",
        "aioserve.outputs",
        "aioserve.request",
        "aioserve.sampling_params",
        "aioserve.scheduler",
        "aioserve.scheduler.registry",
        "aioserve.scheduler.output",
        "aioserve.version",
    },
    "aioserve.operations": {
        "aioserve.background_writer",
        "aioserve.config",
        "aioserve.errors",
        "aioserve.log_format",
        "aioserve.model_source.adapter",
    },
    "aioserve.engine": {
        "aioserve.background_writer",
        "aioserve.row_values",
        "aioserve.hints",
        "aioserve.operations.command",
        "aioserve.kv_connector",
        "aioserve.version",
        "aioserve.output_file",
        "aioserve.config",
        "aioserve.errors",
        "aioserve.multimodal",
        "aioserve.multimodal.families",
        "aioserve.multimodal.prompt",
        "aioserve.multimodal.videos",
        "aioserve.kv_cache",
        "aioserve.log_format",
        "aioserve.model_info",
        "aioserve.model_source.adapter",
        "aioserve.outputs",
        "aioserve.pooling_params",
        "aioserve.request",
        "aioserve.runner.info",
        "aioserve.runner.interface",
        "aioserve.sampling_defaults",
        "aioserve.sampling_params",
        "aioserve.scheduler",
        "aioserve.scheduler.registry",
        "aioserve.scheduler.blame",
        "aioserve.step_loop",
        "aioserve.decision_log.delegate",
        "aioserve.engine.observe.frames",
        "aioserve.engine.observe.feed_observer",
        "aioserve.decision_log.recorder",
        "aioserve.decision_log.records",
        "aioserve.engine.observe.shadow",
        "aioserve.engine.observe.live_shadow",
        "aioserve.engine.observe.timeline",
        "aioserve.decision_log.writer",
        "aioserve.whole",
        "aioserve.grammars",
        "aioserve.byte_alphabet",
        "aioserve.thinking_budget",
    },
    "aioserve.lab": {
        "aioserve.nearest",
        "aioserve.row_values",
        "aioserve.zoo",
        "aioserve.version",
        "aioserve.scheduler.registry",
        "aioserve.hints",
        "aioserve.arguments",
        "aioserve.output_file",
        "aioserve.config",
        "aioserve.shipped",
        "aioserve.engine",
        "aioserve.engine.builder",
        "aioserve.engine.clock",
        "aioserve.engine.core",
        "aioserve.engine.admission.multimodal_prompts",
        "aioserve.engine.kv_cache",
        "aioserve.engine.delivery.request_log",
        "aioserve.errors",
        "aioserve.multimodal",
        "aioserve.kv_cache",
        "aioserve.model_info",
        "aioserve.outputs",
        "aioserve.request",
        "aioserve.runner.info",
        "aioserve.runner.interface",
        "aioserve.runner.simulation.simulated",
        "aioserve.runner.profile",
        "aioserve.progress",
        "aioserve.routing",
        "aioserve.sampling_params",
        "aioserve.scheduler",
        "aioserve.scheduler.blame",
        "aioserve.lab.simulation.multi_step_decode",
        "aioserve.scheduler.output",
        "aioserve.step_loop",
        "aioserve.decision_log.chronicle",
        "aioserve.decision_log.reader",
        "aioserve.decision_log.recorder",
        "aioserve.decision_log.records",
        "aioserve.decision_log.replay",
        "aioserve.yaml_file",
    },
    "aioserve.testing": {
        "aioserve.formats",
        "aioserve.kv_cache.block_pool",
        "aioserve.routing",
        "aioserve.hints",
        "aioserve.row_values",
        "aioserve.kv_connector",
        "aioserve.config",
        "aioserve.errors",
        "aioserve.kv_cache",
        "aioserve.outputs",
        "aioserve.pooling_params",
        "aioserve.request",
        "aioserve.sampling_params",
        "aioserve.scheduler",
        "aioserve.scheduler.blame",
        "aioserve.scheduler.stats",
        "aioserve.lab.simulation.multi_step_decode",
        "aioserve.scheduler.output",
        "aioserve.step_loop",
        "aioserve.structured_outputs",
    },
    "aioserve.testing.faults": {
        "aioserve",
        "aioserve.outputs",
        "aioserve.runner.info",
        "aioserve.runner.interface",
        "aioserve.runner.unsound",
        "aioserve.scheduler.output",
    },
    "aioserve.server": {
        "aioserve.finite_schema",
        "aioserve.hints",
        "aioserve.arguments",
        "aioserve.config",
        "aioserve.engine",
        "aioserve.engine.builder",
        "aioserve.engine.delivery.byte_level",
        "aioserve.engine.admission.chat_template",
        "aioserve.engine.observe.histogram",
        "aioserve.operations",
        "aioserve.operations.command",
        "aioserve.engine.observe.stacks",
        "aioserve.errors",
        "aioserve.formats",
        "aioserve.multimodal",
        "aioserve.multimodal.decoding",
        "aioserve.multimodal.fetching",
        "aioserve.model_source.adapter",
        "aioserve.outputs",
        "aioserve.pooling_params",
        "aioserve.request",
        "aioserve.sampling_defaults",
        "aioserve.sampling_params",
        "aioserve.scheduler",
        "aioserve.version",
        "aioserve.engine.observe.frames",
        "aioserve.reasoning_tokens",
        "aioserve.structured_outputs",
        "aioserve.thinking_budget",
        "aioserve.token_bytes",
        "aioserve.yaml_file",
    },
    "aioserve.workers": {
        "aioserve.process_start",
        "aioserve.runner.info",
        "aioserve",
        "aioserve.arguments",
        "aioserve.config",
        "aioserve.engine",
        "aioserve.engine.client",
        "aioserve.engine.clock",
        "aioserve.engine.client_base",
        "aioserve.engine.observe.histogram",
        "aioserve.engine.admission.input_processor",
        "aioserve.engine.delivery.output_processor",
        "aioserve.engine.admission.pooling_validator",
        "aioserve.engine.observe.loop_monitor",
        "aioserve.operations",
        "aioserve.operations.command",
        "aioserve.engine.samples",
        "aioserve.errors",
        "aioserve.log_format",
        "aioserve.model_info",
        "aioserve.model_source.adapter",
        "aioserve.outputs",
        "aioserve.request",
        "aioserve.server.access.access",
        "aioserve.server.access.accounts",
        "aioserve.server.access.keyring",
        "aioserve.server.app",
        "aioserve.server.middleware",
        "aioserve.server.loading",
        "aioserve.server.responses.store",
        "aioserve.server.running",
        "aioserve.server.sockets",
        "aioserve.version",
    },
    "aioserve.ray": {
        "aioserve.runner.info",
        "aioserve.config",
        "aioserve.engine",
        "aioserve.engine.client",
        "aioserve.engine.clock",
        "aioserve.engine.client_base",
        "aioserve.engine.admission.input_processor",
        "aioserve.engine.admission.pooling_validator",
        "aioserve.operations",
        "aioserve.operations.command",
        "aioserve.engine.samples",
        "aioserve.engine.stream",
        "aioserve.errors",
        "aioserve.hints",
        "aioserve.kv_cache.block_pool",
        "aioserve.model_info",
        "aioserve.outputs",
        "aioserve.pooling_params",
        "aioserve.request",
        "aioserve.routing",
        "aioserve.sampling_params",
        "aioserve.server.access.access",
        "aioserve.server.access.accounts",
        "aioserve.server.access.keyring",
        "aioserve.server.app",
        "aioserve.server.responses.store",
        "aioserve.version",
        "aioserve.workers.engine_end",
        "aioserve.workers.forwarder",
        "aioserve.workers.line",
        "aioserve.workers.messages",
        "aioserve.workers.remote_delivery",
        "aioserve.engine.observe.histogram",
    },
    "aioserve.whole": {
        "aioserve.errors",
        "aioserve.outputs",
        "aioserve.sampling_params",
    },
    "aioserve.client_connection": {
        "aioserve.errors",
        "aioserve.server.errors",
        "aioserve.server.protocol",
    },
    "aioserve.client_batches": {
        "aioserve.client_connection",
        "aioserve.server.batches.protocol",
    },
    "aioserve.client_scoring": {
        "aioserve.client_connection",
        "aioserve.server.scoring.protocol",
    },
    "aioserve.client": {
        "aioserve.client_batches",
        "aioserve.client_connection",
        "aioserve.client_scoring",
        "aioserve.hints",
        "aioserve.errors",
        "aioserve.operations",
        "aioserve.operations.command",
        "aioserve.outputs",
        "aioserve.sampling_defaults",
        "aioserve.sampling_params",
        "aioserve.server.chat.protocol",
        "aioserve.server.logprob_structs",
        "aioserve.server.model_card",
        "aioserve.server.protocol",
        "aioserve.whole",
    },
    "aioserve.output_file": {"aioserve.errors"},
    "aioserve.arguments": {"aioserve.nearest", "aioserve.output_file"},
    "aioserve.child": {
        "aioserve.process_start",
        "aioserve.arguments",
        "aioserve.client",
        "aioserve.config",
        "aioserve.errors",
        "aioserve.log_format",
        "aioserve.outputs",
        "aioserve.sampling_params",
        "aioserve.whole",
    },
    "aioserve.console": {
        "aioserve.arguments",
        "aioserve.client",
        "aioserve.errors",
        "aioserve.kernels.cpu",
        "aioserve.kernels.library",
        "aioserve.model_source.downloads",
        "aioserve.runner.cpu",
        "aioserve.runner.devices",
        "aioserve.nearest",
        "aioserve.outputs",
        "aioserve.sampling_defaults",
        "aioserve.sampling_params",
        "aioserve.version",
        "aioserve.server.model_card",
        "aioserve.server.protocol",
    },
    "aioserve.cli": {
        "aioserve.process_start",
        "aioserve.arguments",
        "aioserve.config",
        "aioserve.errors",
        "aioserve.log_format",
        "aioserve.missing",
        "aioserve.model_source.downloads",
        "aioserve.nearest",
        "aioserve.version",
    },
    "aioserve.__main__": {"aioserve.missing", "aioserve.process_start"},
    "aioserve": {"aioserve.version"},
    "aioserve.policies": {"aioserve.scheduler"},
}


def home(module: str) -> str:
    """The entry of ALLOWED that a module belongs to: the longest one."""
    return max((name for name in ALLOWED if f"{module}.".startswith(f"{name}.")), key=len)


def module_level_imports(path: Path) -> set[str]:
    """Modules of this project that importing the file imports."""
    found: set[str] = set()
    todo: list[ast.stmt] = list(ast.parse(path.read_text()).body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            todo += node.body + node.orelse
        elif isinstance(node, ast.ClassDef | ast.Try):
            todo += node.body
    return {name for name in found if name.split(".")[0] == "aioserve"}


def module_name(path: Path) -> str:
    """Of policies, where setup.py puts them."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return f"aioserve.{name}" if path.is_relative_to(ROOT / "policies") else name


MODULES = {
    module_name(path): path
    for path in sorted([*ROOT.glob("aioserve/**/*.py"), *ROOT.glob("policies/**/*.py")])
}


@functools.cache
def known_modules() -> dict[str, set[str]]:
    """By module, those that it names in an import anywhere: in a function, or for the types."""
    known = {}
    for name, path in MODULES.items():
        found: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                members = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= members & MODULES.keys() or {node.module}
        known[name] = found & MODULES.keys()
    return known


@pytest.mark.parametrize("module", MODULES)
def test_every_import_edge_is_an_allowed_one(module: str) -> None:
    own = home(module)
    for imported in module_level_imports(MODULES[module]):
        assert imported in ALLOWED[own] or home(imported) == own, f"{module} imports {imported}"


def test_no_module_knows_another_that_knows_it() -> None:
    """Directly or by a detour, if only in a function or for the types."""
    TopologicalSorter(known_modules()).prepare()  # raises CycleError, which names them


def test_no_folder_of_the_lab_knows_another_that_knows_it() -> None:
    lab = {
        name: name.rpartition(".")[0]
        for name, path in MODULES.items()
        if name.startswith("aioserve.lab.") and path.name != "__init__.py"
    }
    folders: dict[str, set[str]] = {}
    for name, folder in lab.items():
        known = {lab[other] for other in known_modules()[name] & lab.keys()} - {folder}
        folders.setdefault(folder, set()).update(known)
    TopologicalSorter(folders).prepare()


@pytest.mark.parametrize(
    ("package", "place"),
    [
        ("aioserve.runner.cpu", "aioserve.engine.builder"),
        ("aioserve.runner.cuda", "aioserve.engine.builder"),
        ("aioserve.kernels", "aioserve.runner.cpu"),
    ],
)
def test_what_computes_is_known_in_one_place(package: str, place: str) -> None:
    """The seams of the runner know neither side of it, and the sides do not know each other. The
    doctor computes nothing: it asks all of them what they find here.
    """
    own = {name for name in MODULES if f"{name}.".startswith(f"{package}.")}
    knowing = {name for name, known in known_modules().items() if known & own} - own
    knowing -= {"aioserve.console.doctor"}
    assert knowing
    assert all(f"{name}.".startswith(f"{place}.") for name in knowing), knowing


@pytest.mark.parametrize("module", ["aioserve", "aioserve.cli", "aioserve.testing"])
def test_importing_loads_no_torch(module: str) -> None:
    code = (
        f"import sys, {module}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_a_simulation_loads_neither_torch_nor_transformers() -> None:
    code = """
import sys
from aioserve.cli import main
assert main(["compare", "configs/fcfs.yaml", "--workload", "configs/workloads/mixed.yaml",
             "--limit", "5", "--jobs", "1"]) == 0
print([m for m in ("torch", "transformers") if m in sys.modules])
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout.splitlines()[-1] == "[]"


def test_no_test_reaches_into_the_parts_of_an_engine() -> None:
    """`AsyncEngine.inspect` tells what they do; a fault is put around a class."""
    private = f".{'_parts'}"
    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/**/*.py")]
    assert len(files) > 100
    assert [str(path) for path in files if private in path.read_text(encoding="utf-8")] == []


def test_every_public_name_can_be_had() -> None:
    import aioserve

    for name in aioserve.__all__:
        assert getattr(aioserve, name) is not None


@pytest.mark.parametrize("package", ["aioserve.engine", "aioserve.runner"])
def test_no_room_of_a_package_knows_another_that_knows_it(package: str) -> None:
    """Rooms are the folders below a package; what stands beside them puts them together."""
    rooms = {
        name: ".".join(name.split(".")[:3])
        for name, path in MODULES.items()
        if name.startswith(f"{package}.") and path.parent.parent.name == package.split(".")[1]
    }
    known: dict[str, set[str]] = {}
    for name, room in rooms.items():
        others = {rooms[other] for other in known_modules()[name] & rooms.keys()} - {room}
        known.setdefault(room, set()).update(others)
    assert len(known) >= 4
    TopologicalSorter(known).prepare()
