"""Writes robustness.md and its charts from the stored results in robustness.json.

python docs/make_robustness.py --measure burst --machine "AMD EPYC"   # one of RUNS, kept anew
python docs/make_robustness.py
"""

import argparse
import json
import shlex
import tempfile
import time
from pathlib import Path
from textwrap import fill
from typing import Any

import msgspec

from aioserve.cli.main import main as aioserve
from aioserve.lab.comparison.measures import number, parse_measure
from aioserve.lab.mispredict import KINDS, Curves, draw, in_words
from aioserve.lab.search import render_tuning
from aioserve.lab.tuning import Tuning

HERE = Path(__file__).parent
STORED = HERE / "robustness.json"
MACHINE = "--set runner.profile=zoo-1 --set cache.block_size=16 --set cache.num_kv_blocks=3000"
POLICIES = (
    "zoo.sjf zoo.srpt zoo.mc_sf peak_memory_predicted zoo.justitia "
    "examples/recipes/shortest_predicted.py"
)
TRACE = (
    "search chunked_prefill --workload AzureLLMInferenceTrace_conv.csv --limit {} "
    "--time-scale 2 --set scheduler.options.chunk_size=64,128,256,1024 --by good_share "
    f"--slo ttft=1,gap=0.05 {MACHINE} --set scheduler.max_num_seqs=128"
)
#: By name: the command that was measured. Traces lie in the folder in which it is called.
RUNS = {
    "burst": f"mispredict {POLICIES} --workload chat --time-scale 0.1 --seeds 8 {MACHINE} "
    "--set scheduler.max_num_seqs=128 --set scheduler.max_num_batched_tokens=512",
    "mixed": f"mispredict {POLICIES} --workload mixed --limit 100 --time-scale 0.2 --seeds 4 "
    f"--errors lognormal:0,0.5,1,2 {MACHINE} --set scheduler.max_num_seqs=16 "
    "--set scheduler.max_num_batched_tokens=512",
    "trace": TRACE.format(3000),
    "other-trace": f"{TRACE.format(800)} --held-out AzureLLMInferenceTrace_code.csv",
}
MARKS = {"better": "**{}**", "worse": "*{}*"}  # of a difference from the baseline that is sure
TEXT = """# Robustness of the answers

A comparison is valid for the predictions and the requests that it was run with. Two questions are
left. How much does a policy that needs the lengths of replies lose when the predictions are wrong?
How well do tuned options carry over to requests that they were not tuned on?

## Over the error of predictions

`python -m aioserve mispredict` gives each request a prediction of its reply's length, as the hint
`predicted_output_tokens`, and increases the error from run to run. All runs have the same
requests and the same random numbers for the errors, so a larger error is the same error scaled up.
There are three kinds of errors:

- `lognormal:SIGMA`: the true length times a factor whose logarithm is normal with mean 0 and
  standard deviation sigma, as in Dell'Amico, Carra and Michiardi, [PSBS: Practical Size-Based
  Scheduling](https://arxiv.org/abs/1410.6122), 2016. A prediction is as likely too long by a
  factor as too short by it. Two of three predictions are within a factor of 1.65 at sigma 0.5, 2.7
  at sigma 1 and 7.4 at sigma 2.
- `ranks:TAU`: lengths in an order whose rank correlation with the true one is Kendall's tau, by
  which Fu et al., [Efficient LLM Scheduling by Learning to
  Rank](https://arxiv.org/abs/2408.15792), 2024, measure predictors. 1 is the true order, 0 a
  random one. The ranks are those of two normal variables of correlation sin(pi tau / 2) (Kruskal,
  *Ordinal Measures of Association*, 1958).
- `classes:64,256:ACCURACY`: the middle of a class of lengths, which is the right class with this
  probability, and otherwise any other. Jin et al., [S3](https://arxiv.org/abs/2306.06000), 2023,
  predict classes.

These are models. The errors of a real predictor depend on the request, and may be biased: to test
a real predictor, write its predictions as hints into a request log, and compare.

Each policy is compared with itself without predictions, and with a baseline that uses none,
`chunked_prefill`; all of them use at most 512 tokens per step. Step times are computed from the
data sheet of an A100 for a model of 8 billion parameters (the profile `zoo-1`), and not measured.
`peak_memory_predicted` is `zoo.peak_memory` with predictions. `shortest_predicted` is the
[recipe](policy-recipes.md) of that name, which learns lengths from earlier replies if there are no
predictions. `zoo.jitserve` uses predictions only for requests with a deadline, of which there are
none here.

### A burst of chats

600 chats arrive within six seconds, many more than the engine can serve in that time.

@burst@

### Chats beside long documents

100 requests of `mixed` arrive within a second, one in ten of them a long document, on 16 seats.

@mixed@

### What the curves say

@says@

## Options on other requests

`python -m aioserve search` with several values of a setting chooses options on a training part and
evaluates them on a held-out part ([how](comparing-policies.md#options-that-suit-a-workload)). The
best of several scores is too optimistic, because it is partly the best by chance (Cawley and
Talbot, *On Over-fitting in Model Selection and Subsequent Selection Bias in Performance
Evaluation*, JMLR 11, 2010). The held-out score shows the value of the choice.

### The later part of a trace

The first 3,000 requests of the [conversation trace of
Azure](https://github.com/Azure/AzurePublicDataset) of 2023, at half the rate.

@trace@

### Another trace

The same candidates, chosen on the first 800 conversations and evaluated on the first 800 requests
of Azure's trace of code, which has longer prompts and shorter replies.

@other-trace@

The options that keep 99.1% of the later conversations within these limits keep only 15.4% of the
code requests: more than the default, but without a guarantee. Whether another value would be
better for code is not evaluated, because that would be another choice. The difference has no
interval here, because 800 requests in such a queue have too few independent blocks.
"""
SAYS = """The burst, with eight seeds, shows the following:

- **Shortest first without preemption loses its gain slowly.** Exact lengths reduce the mean time
  of chats by 14% (`zoo.sjf`, `zoo.mc_sf`, `shortest_predicted`), lengths with sigma 0.5 by 12%,
  and with sigma 1 by 8%. At sigma 2 no difference is significant, and the mean is no worse: a
  wrong order is here no worse than the order of arrival.
- **Preemption by predictions can do harm.** `zoo.srpt` gains 11% with exact lengths, but its mean
  is worse than the baseline's from sigma 1.3 on, because preempted requests are computed again.
- **Admission by peak memory needs a prediction, but hardly a good one**, if memory is not short.
  Without one it reserves the 2,048 tokens that clients allow, and takes 3.6 times as long. With
  any of these predictions it admits requests as the baseline does. The cost of wrong predictions
  when memory is short has not been measured.
- **`zoo.justitia` depends little on predictions.** It also uses the lengths of prompts, and is
  ahead without predictions; with sigma 1 and more it is worse than without them.

In the second workload few differences are significant, because four seeds of 100 requests are few.
The means show the same trends, and only `zoo.justitia` loses significantly by bad predictions."""


def measure(name: str, machine: str) -> None:
    """Run a command, and store what it found."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        if aioserve([*shlex.split(RUNS[name]), "--json", str(file)]):
            raise SystemExit(f"{RUNS[name]} failed")
        keep(name, machine, json.loads(file.read_bytes()))


def keep(name: str, machine: str, found: Any) -> None:
    """Store what the command of this name found today."""
    stored = json.loads(STORED.read_bytes()) if STORED.exists() else {}
    entry = {"command": RUNS[name], "date": time.strftime("%Y-%m-%d"), "machine": machine}
    stored[name] = {**entry, "found": found}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(stored.items())]
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def pages() -> dict[str, str]:
    """By name, what the files should hold."""
    page, found = TEXT.replace("@says@", SAYS), {}
    for name, entry in json.loads(STORED.read_bytes()).items():
        if "curves" in entry["found"]:
            curves = msgspec.convert(entry["found"], Curves)
            found[f"robustness-{name}.svg"] = draw(curves)
            text = _shown(name, curves)
        else:
            tuning = msgspec.convert(entry["found"], Tuning)
            text = f"```text\n{render_tuning(tuning, parse_measure(tuning.measure))}\n```"
        command = fill(
            f"python -m aioserve {entry['command']}", 96, subsequent_indent="    "
        ).replace("\n", " \\\n")
        when = f"Measured on {entry['date']} ({entry['machine']}; virtual time):"
        page = page.replace(f"@{name}@", f"```bash\n{command}\n```\n\n{when}\n\n{text}", 1)
    return {"robustness.md": page, **found}


def _shown(name: str, curves: Curves) -> str:
    """The chart, the table and the sentences of one workload."""
    row, symbol = parse_measure(curves.measure), KINDS[curves.kind][0]
    alt = f"{row.label} of each policy over the error of predictions"
    lines = [f"![{alt}](robustness-{name}.svg)", ""]
    errors = [f"{point.error:g}" for point in curves.curves[0].points]
    lines.append(f"| {row.label} | no predictions | {symbol} {' | '.join(errors)} |")
    lines.append("|---" * (2 + len(errors)) + "|")
    base = number(curves.baseline_value, row)
    lines.append(f"| {curves.baseline} | {base} |" + " |" * len(errors))
    for curve in curves.curves:
        cells = [(curve.blind, curve.blind_against_baseline)]
        cells += [(point.value, point.against_baseline) for point in curve.points]
        marked = (MARKS.get(apart.verdict, "{}").format(number(v, row)) for v, apart in cells)
        lines.append(f"| {curve.policy} | {' | '.join(marked)} |")
    said = (f"- {' '.join(in_words(curve, curves))}" for curve in curves.curves)
    bold = f"**Bold**: surely ahead of {curves.baseline}; *italic*: surely behind it."
    return "\n".join([*lines, "", bold, "", *said])


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the page on robustness.")
    parser.add_argument("--measure", choices=RUNS, help="run this command anew first")
    parser.add_argument("--machine", default="", help="what the page says of the machine")
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure, arguments.machine)
    for name, text in pages().items():
        (HERE / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
