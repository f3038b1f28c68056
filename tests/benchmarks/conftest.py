"""Benchmarks are scripts, not a package: their folder goes on the path, as when they are run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
