"""The JSON-Schema test-suite against our grammars: `make test-schemas`.

No schema that is served may allow a text that the suite calls invalid. That it refuses a valid one
is told: it may be stricter, as with the order of properties. Fetches the suite inside the source
package of `jsonschema`; knows nothing about the engine.
"""

import asyncio
import json
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from aioserve.config import ModelConfig, StructuredOutputsConfig
from aioserve.errors import RequestError
from aioserve.features.grammars import GrammarCompiler
from aioserve.model_source.info import ModelInfo
from aioserve.params import StructuredOutputs

PACKAGE = "jsonschema==4.26.0"
BUILD_TOOLS = ("hatchling", "hatch-vcs", "hatch-fancy-pypi-readme")  # which pip asks for
DRAFT = "draft2020-12"


def fetch(folder: Path) -> Path:
    """The suite's cases, in a file each."""
    tools = folder / "tools"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "install", "--target", tools, *BUILD_TOOLS], check=True)
    words = ["--no-binary", "jsonschema", "--no-deps", "--no-build-isolation", "-d", folder]
    environment = {"PYTHONPATH": str(tools), "PATH": f"{tools}/bin:/usr/bin:/bin"}
    subprocess.run([*pip, "download", *words, PACKAGE], check=True, env=environment)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        source.extractall(folder, filter="data")
    return next(folder.glob(f"*/json/tests/{DRAFT}"))


async def main() -> int:
    """Prints what is served, and each text judged otherwise; 1 if an invalid one is let by."""
    info = ModelInfo(ModelConfig())
    # As the suite has it, objects are open.
    settings = StructuredOutputsConfig(json_objects="open")
    compiler, tokenizer = GrammarCompiler(info, settings), info.tokenizer
    refused: Counter[str] = Counter()
    num_served = num_right = 0
    wrong: list[tuple[str, str, str, Any, bool]] = []
    with tempfile.TemporaryDirectory() as folder:
        paths = sorted(fetch(Path(folder)).glob("*.json"))
        groups = [(path.stem, group) for path in paths for group in json.loads(path.read_text())]
    for name, group in groups:
        if not isinstance(group["schema"], dict):
            continue
        wanted = StructuredOutputs(json=group["schema"])
        try:
            await compiler.check(wanted)
        except RequestError as error:
            refused[str(error).removeprefix("structured_outputs.json: ").split(":")[0][:60]] += 1
            continue
        num_served += 1
        for case in group["tests"]:
            text = json.dumps(case["data"], ensure_ascii=False)
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            matcher = compiler.matcher(wanted)
            taken = matcher.try_consume_tokens(token_ids)
            is_valid = taken == len(token_ids) and matcher.is_accepting()
            if is_valid == case["valid"]:
                num_right += 1
            else:
                wrong.append((name, group["description"], case["description"], text, case["valid"]))
    compiler.close()
    for name, group, case, text, is_valid in wrong:
        print(f"{name}: {group}: {case}: {text} is {'valid' if is_valid else 'invalid'}")
    print(f"{num_served} of {num_served + refused.total()} schemas are served. Refused:")
    for reason, count in refused.most_common():
        print(f"  {count:4}  {reason}")
    print(f"{num_right} texts are judged as the suite does, {len(wrong)} are not")
    num_let_by = sum(not is_valid for *_, is_valid in wrong)
    print(f"{num_let_by} of these are invalid and let by")
    print(
        json.dumps(
            {
                "served": num_served,
                "refused": refused.total(),
                "right": num_right,
                "wrong": len(wrong),
            }
        )
    )
    return int(num_let_by > 0)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
