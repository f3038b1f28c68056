"""Writes zoo.md and zoo.svg from the stored results of the zoo.

python -m aioserve zoo zoo.NAME --store       # measures one policy and keeps its results
python -m aioserve zoo --store --only costs   # the costs of all, on one machine
python -m aioserve zoo --store --only seeds   # of all, the seeds up to 10 that are not stored
python docs/make_zoo.py
"""

from pathlib import Path

from aioserve.lab.zoo.gallery import render
from aioserve.lab.zoo.page import draw
from aioserve.lab.zoo.standing import leaderboard, read_results

HERE = Path(__file__).parent


def pages() -> dict[str, str]:
    """By name, what the files should hold."""
    results = read_results()
    results = results.only(results.num_seeds)
    return {"zoo.md": render(results), "zoo.svg": draw(leaderboard(results))}


if __name__ == "__main__":
    for name, text in pages().items():
        (HERE / name).write_text(text, encoding="utf-8")
