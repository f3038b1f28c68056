"""What stands for a model's files changes when they do."""

import os
import time
from pathlib import Path

from aioserve.features.kv_connector import fingerprint


def test_a_changed_model_has_another_fingerprint(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(3 << 20))
    (tmp_path / "README.md").write_text("says nothing about keys and values")
    before, when = fingerprint(tmp_path), time.time_ns()
    os.utime(weights, ns=(when, when))
    touched = fingerprint(tmp_path)
    content = bytearray(weights.read_bytes())
    content[2 << 20] = 1
    weights.write_bytes(content)
    os.utime(weights, ns=(when, when))
    assert len({before, touched, fingerprint(tmp_path)}) == 3
    changed = fingerprint(tmp_path)
    (tmp_path / "README.md").write_text("nor does this")
    assert fingerprint(tmp_path) == changed


def test_a_changed_part_of_a_file_in_parts_changes_the_fingerprint(tmp_path: Path) -> None:
    first, second = (tmp_path / f"m[1]-0000{number}-of-00002.gguf" for number in (1, 2))
    first.write_bytes(b"first")
    second.write_bytes(b"second")
    before = fingerprint(first)
    (tmp_path / "m[1]-00001-of-00003.gguf").write_bytes(b"of another model")
    assert fingerprint(first) == before
    second.write_bytes(b"other!")
    assert fingerprint(first) != before
