"""What the page of the zoo says in words: its head, its questions, and the nine in short.

Knows no numbers.
"""

from typing import Literal, NamedTuple

HEAD = """\
# The zoo: published schedulers on the same workloads

Made by `python docs/make_zoo.py` from stored results; a test keeps it true. {published}
schedulers of papers and other engines, one file each in [policies/zoo](../policies/zoo), and the
nine of [policies.md](policies.md): {policies} policies on one engine, {workloads} workloads,
{seeds} seeds each, in virtual time. Any of them runs on a server: `python -m aioserve --policy
zoo.srpt`, or `--config zoo.srpt` with the file in [configs/zoo](../configs/zoo).

```bash
python -m aioserve zoo path/to/mine.py:Mine --html mine.html   # yours: half a minute on two cores
python -m aioserve zoo zoo.srpt fcfs --quick                   # one seed: a first look
python -m aioserve zoo                                         # all of them anew: some minutes
```

The workloads, seeds and step times are frozen as **{standard}**, digest `{digest}`: two results
with this digest can be compared. What counts is **in time**: the share of the requests, and of
the programs of agents, that kept to all [limits](#the-limits-in-seconds) of their class, as the
mean over the classes of a workload: a few long documents count as much as many chats. Every
workload is near what the engine can serve, where policies differ.

![Share of requests in time, by policy and workload](zoo.svg)

A frame marks a policy to which no other one is surely better on that workload: the 95% interval of
each difference, over the same seeds (Student), has 0 in it or is in the policy's favour. It says
that {seeds} seeds leave the question open, and not that the policies are equal: one whose shares
vary from seed to seed has a frame at a mean at which a steady one has none.
"""

LIMITS = """\
From `configs/workloads/{standard}-chat.yaml` and its neighbours. TTFT is the time to the first
token, TPOT the mean time for each token after it, gap the longest time between two tokens of the
request, end to end the time to the last token, and program the time from the first arrival of an
agent's program to its last token, pauses of tools included. An empty cell is no limit.
"""


class Question(NamedTuple):
    """A question, the workload whose numbers answer it, and the policies that it leaves."""

    asks: str
    workload: str
    among: Literal["any", "lengths", "nothing"]
    why: str


QUESTIONS = [
    Question(
        "1. Do long documents stand beside chats?",
        "documents",
        "any",
        "A prompt of 20,000 tokens takes seconds: it must neither stall the streams nor be put off "
        "for ever.",
    ),
    Question(
        "2. Are your clients agents, whose programs are many requests?",
        "agents",
        "any",
        "The last token of the program counts, and prefixes come again after each tool.",
    ),
    Question(
        "3. Is there offline work, such as batches?",
        "offline",
        "any",
        "It should fill what the online requests leave, and give way when they come in a burst.",
    ),
    Question(
        "4. Do tenants share the engine, of which some flood it?",
        "tenants",
        "any",
        "Look at *service apart* as well, which is the difference in service between tenants.",
    ),
    Question(
        "5. None of these: chats. Can you say how long a reply will be? If so:",
        "chat",
        "lengths",
        "Those that need lengths, and those that need nothing. Predictions are off by a factor "
        "with a spread of 0.5 here (log-normal): two of three are within a factor of 1.65. [With "
        "other errors](robustness.md)",
    ),
    Question(
        "If not, and the clients tell nothing else either:",
        "chat",
        "nothing",
        "These decide by arrival, prompt, progress, cache and step time alone. The limits of this "
        "workload are the defaults of `deadline`: set yours.",
    ),
]

MACHINE = """\
**rank**: by what is in time over all workloads; in parentheses the range that chance leaves, from
the 95% interval of each difference over the seeds. **wins**, **loses**: workloads on which the
policy is in the first, or last, quarter of all, whatever chance does. **us a step**: microseconds
of CPU for one `schedule()` with 1,000 requests running and 10,000 waiting, of which 15 end and 15
come each step; **ratio**: times what `chunked_prefill` took just before ({costs}; other programs
ran beside it, so read the ratio, not the time).

What to keep in mind: step times are those of a data sheet (`{standard}` in
`aioserve/runner/profiles`), not of a card; the policies have the defaults of their papers where
those state any, and were tuned to no workload; a policy that needs more than clients tell here
shows less than it can. A step has at most {budget} tokens, decodes included, under every policy, by
name or by file: one that adapts its steps chooses among smaller ones, and one that runs whole
prompts (`runs_whole_prompts`) has room for the longest. A request that is rejected or not finished
counts as late, so that no policy rises by rejecting; times to first token and to the end are of the
requests that got there: look at *unfinished requests* beside them.

All measures of a policy, with ranks, are in the report of `python -m aioserve zoo NAME --html
FILE`:
"""

#: Of the nine policies: what each optimizes, and what it needs.
NINE = {
    "chunked_prefill": ("steady streams", "nothing"),
    "deadline": ("the most requests within one time to first token and one pace", "nothing"),
    "fair": ("the same service for each client", "clients (the request's user)"),
    "fcfs": ("order of arrival; whole prompts", "nothing"),
    "hrrn": ("early first tokens without starvation", "nothing"),
    "latency_budget": ("a bound on the gaps between tokens", "nothing"),
    "mlfq": ("early ends of short replies, without predictions", "nothing"),
    "prefix_aged": ("cache hits without starvation", "nothing"),
    "priority": ("urgent requests first", "priorities (of the request)"),
}
