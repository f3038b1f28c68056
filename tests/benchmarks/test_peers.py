"""What peers.py asks of servers: prompts that fit, floors beside them, one instruction set."""

import os
import platform
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import peers
import pytest
import torch
from build_peers import BFLOAT16, FILES, HOLD, PEERS, Peer, build_hold, servers
from harness import LoadShape
from make_model import make_model
from peers import FLOOR, PROMPTS, Cell, Results, Settings, Visit, begin, command, peer_loads

from aioserve.kernels.library import cpu_flags, extension

BENCHMARKS = Path(peers.__file__).parent


def test_a_load_goes_to_the_servers_that_have_room_for_its_requests() -> None:
    found = {peer.key: peer_loads(peer, ["W3", *PROMPTS]) for peer in [*servers(), FLOOR]}
    assert found["ours-bfloat16"] == found["vllm"] == found["floor"] == ["W3", "P2", "P4", "P8"]
    assert found["llama.cpp-bfloat16"] == ["W3", "P2"]


def _results(folder: Path, medians: dict[str, list[float]], held: str = "") -> Results:
    """One round, by servers and loads."""
    results = begin(folder, Settings("a CPU", 2, "abc", {}, held), fresh=False)
    for server, values in medians.items():
        cells = {
            load: Cell({"TTFT p50 ms": value, "tokens/s": value}, 0.0, 0.0, [], [])
            for load, value in zip(PROMPTS if not held else ("W1", "W3"), values, strict=False)
        }
        results.add(Visit(0, server, 1.0, 1.0, 1.0, cells))
    return results


def test_prompts_are_beside_their_floor_and_beside_the_fastest_peer(tmp_path: Path) -> None:
    asked = [peer for peer in servers() if peer.weights == BFLOAT16] + [FLOOR]
    medians = {"ours-bfloat16": [500.0, 1200.0, 3500.0], "vllm": [600.0, 1000.0, 7000.0]}
    medians |= {"llama.cpp-bfloat16": [3000.0], "floor": [250.0, 600.0, 1750.0]}
    found = peers._full_tables(_results(tmp_path, medians), asked)
    assert found[1].splitlines() == [
        "| weights | server | P2: 2,048 tokens in | P4: 4,096 tokens in | P8: 8,100 tokens in |",
        "|---|---|---|---|---|",
        "| bfloat16 | aioserve | 500 | 1,200 | 3,500 |",
        "| bfloat16 | llama.cpp | 3,000 |  |  |",
        "| bfloat16 | vLLM (CPU) | 600 | 1,000 | 7,000 |",
        "| bfloat16 | floor: products and attention | 250 | 600 | 1,750 |",
    ]
    assert found[-1].splitlines()[2:] == [
        "| aioserve to the floor | 2.00 | 2.00 | 2.00 |",
        "| llama.cpp to the floor | 12.00 |  |  |",
        "| vLLM (CPU) to the floor | 2.40 | 1.67 | 4.00 |",
        "| best peer to aioserve | 1.20 | 0.83 | 2.00 |",
    ]


def test_what_is_held_says_so_and_has_no_column_that_was_not_measured(tmp_path: Path) -> None:
    asked = servers(is_held=True)
    results = _results(tmp_path, {"ours-Q4_0": [60.0, 6.0], "llama.cpp-Q4_0": [50.0, 2.0]}, "avx2")
    assert "a CPU, held to AVX2, " in peers._sentences(results).replace("\n", " ")
    found = peers._full_tables(results, asked)
    assert found[1].splitlines()[0] == "| weights | server | W1: 1 stream | W3: 4 long prompts |"
    assert found[-1].endswith("| a CPU | Q4_0 | 1.20 |  | 3.00 |  |  |")


def test_servers_that_no_variable_holds_are_others() -> None:
    free, held = ({peer.key: peer for peer in servers(is_held=is_held)} for is_held in (0, 1))
    changed = {key for key in free if free[key] != held[key]}
    assert changed == {
        "vllm",
        *(f"{peer}-{own}" for peer in ("llama.cpp", "openvino") for own in FILES),
    }
    assert dict(held["openvino-Q4_0"].environment) == {"LD_PRELOAD": str(HOLD)}
    assert HOLD in held["openvino-Q4_0"].needs
    assert held["llama.cpp-Q4_0"].words[0] == str(PEERS / "llama.cpp-avx2" / "llama-server")
    assert held["vllm"].words[1] == str(BENCHMARKS / "vllm_avx2.py")


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not shutil.which("cc") or not extension("cpu").exists(),
    reason="asks an x86 CPU, by a compiled library",
)
def test_a_program_that_asks_the_cpu_itself_sees_no_more_than_avx2(tmp_path: Path) -> None:
    build_hold(tmp_path)
    asks = "import aioserve.kernels.library as library; print(*library.cpu_flags())"
    environment = {**os.environ, "LD_PRELOAD": str(tmp_path / HOLD.name)}
    done = subprocess.run(
        [sys.executable, "-c", asks], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode == 77:  # on purpose: it would not be held
        assert "cannot hide" in done.stderr
        pytest.skip("this CPU cannot hide what it has")
    found = set(done.stdout.split())
    assert found == {flag for flag in cpu_flags() if not flag.startswith(("avx512", "amx", "avx_"))}
    assert "avx2" in found


def test_vllm_is_told_of_no_more_than_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", torch.cpu.get_capabilities)  # until the end
    before = torch.cpu.get_capabilities()
    runpy.run_path(str(BENCHMARKS / "vllm_avx2.py"))
    assert not torch.cpu._is_avx512_supported()
    assert not torch.cpu._is_avx512_bf16_supported()
    assert not torch.cpu._is_amx_tile_supported()
    assert torch.cpu.get_capabilities().get("avx2") == before.get("avx2")


def test_the_page_has_the_command_that_was_typed() -> None:
    assert command(["--write"]) == "make bench-peers ARGS=--write"
    assert command(["--loads", "P2", "--write"]) == 'make bench-peers ARGS="--loads P2 --write"'


@pytest.mark.slow
def test_a_round_asks_new_prompts_of_a_server_and_measures_their_floor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("2m", tmp_path / "2m")
    words = (sys.executable, "-m", "aioserve", "--model", str(model), "--port", "{port}")
    peer = Peer("ours-bfloat16", "aioserve", BFLOAT16, words, ready="/ready")
    monkeypatch.setattr(peers, "servers", lambda is_held: [peer])
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    monkeypatch.setattr(peers, "DIRECTORY", model)
    for load, size in zip(PROMPTS, (64, 96, 128), strict=True):
        monkeypatch.setitem(peers.LOADS, load, LoadShape(1, size, 4))
    args = peers.program.parse(["--loads", "P2", "P8", "--rounds", "1", "--wait", "0"])
    assert args.run(args) == (None, 0)
    kept = msgspec.json.decode((tmp_path / "build/bench-prompts/results.json").read_bytes())
    cells = {visit["server"]: visit["cells"] for visit in kept["visits"]}
    assert set(cells) == {"ours-bfloat16", "floor"}
    for load in ("P2", "P8"):
        ours = cells["ours-bfloat16"][load]
        assert ours["errors"] == []
        assert ours["values"]["TTFT p50 ms"] > 0
        assert not any("in its cache" in note for note in ours["notes"])
        assert list(cells["floor"][load]["values"]) == ["TTFT p50 ms"]
