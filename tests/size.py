"""Lines per folder, beside the limits that the project sets itself: `make size`.

What is over its limit, or has none, makes it fail. Then shorten it; or raise the limit, in a commit
that says what is gained. Counts all lines of Python and C, comments included; knows no history.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

# A little above what there is. What stands alone is the folder's own files.
LIMITS = {
    "aioserve": 3_960,
    "aioserve/child": 570,
    "aioserve/console": 1_460,
    "aioserve/engine": 7_430,
    "aioserve/grammars": 640,
    "aioserve/images": 610,
    "aioserve/kernels": 3_690,
    "aioserve/kv_cache": 1_270,
    "aioserve/kv_connector": 870,
    "aioserve/lab": 7_240,
    "aioserve/model_source": 2_350,
    "aioserve/ray": 1_510,
    "aioserve/routing": 390,
    "aioserve/runner": 16_650,
    "aioserve/scheduler": 2_780,
    "aioserve/server": 10_930,
    "aioserve/testing": 4_390,
    "aioserve/watch": 2_290,
    "aioserve/workers": 1_960,
    "benchmarks": 7_540,
    "policies": 600,
    "tests": 55_300,
}
SUFFIXES = {".py", ".c", ".h"}


def measure() -> dict[str, dict[Path, int]]:
    """The lines of every file, by folder. Inside `aioserve` each package counts by itself."""
    found: dict[str, dict[Path, int]] = {}
    for top in ("aioserve", "benchmarks", "policies", "tests"):
        for path in sorted((ROOT / top).rglob("*")):
            if path.suffix in SUFFIXES:
                parts = path.relative_to(ROOT).parts
                folder = "/".join(parts[: 2 if top == "aioserve" and len(parts) > 2 else 1])
                lines = path.read_text(encoding="utf-8").count("\n")
                found.setdefault(folder, {})[path] = lines
    return found


def main() -> int:
    """Print the table. Returns 1 if a folder is over its limit or has none, else 0."""
    too_long, total = [], 0
    print(f"{'folder':20} {'files':>5} {'lines':>7} {'limit':>7}   longest file")
    for folder, files in measure().items():
        lines, limit = sum(files.values()), LIMITS.get(folder)
        longest = max(files, key=lambda path: files[path])
        print(
            f"{folder:20} {len(files):5} {lines:7,} {limit or 0:7,}   "
            f"{longest.relative_to(ROOT / folder)}, {files[longest]:,}"
        )
        total += lines
        if limit is None:
            too_long.append(f"{folder} has no limit: set one")
        elif lines > limit:
            too_long.append(
                f"{folder} has {lines:,} lines, its limit is {limit:,}: shorten it or raise that"
            )
    print(f"{'in all':20} {'':5} {total:7,} {sum(LIMITS.values()):7,}")
    for what in too_long:
        print(f"{what} in tests/size.py", file=sys.stderr)
    return bool(too_long)


if __name__ == "__main__":
    sys.exit(main())
