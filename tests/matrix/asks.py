"""A request of the matrix: what it may ask for besides tokens, and with which values."""

from dataclasses import dataclass

from aioserve.params import ThinkingBudget

GRAMMAR = ("Be patient, sir.", "Be gone, sir.", "Be gone, madam!", "Farewell!")
_CALL = '<tool_call>\n{"name": "go", "arguments": {"to": "%s"}}\n</tool_call>'
TOOLS = tuple(_CALL % place for place in ("Rome", "Troy", "Roma"))
#: With the tokens of `ADDED`: forced, in the middle, and beside another.
MARKED = ("<tool_call>go</tool_call>", "<tool_call>gone", "So <think>", "So </think><think>.")
ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>")
TEXTS = {"grammars": GRAMMAR, "tools": TOOLS, "added tokens": MARKED}
REPETITION, PRESENCE, FREQUENCY = 1.3, 0.4, 0.3
STOPS = ("d", "f", "h", "i", "w")  # letters that no text of TOOLS has
BUDGET = ThinkingBudget(max_tokens=4, start="<think>", end="</think>", is_implied=True)
SEED = 7
NUM_LOGPROBS, NUM_PROMPT_LOGPROBS = 3, 2


@dataclass(frozen=True)
class Ask:
    """A request: which prompt, what is asked for besides tokens, with the adapter or without."""

    place: int
    kinds: frozenset[str] = frozenset()
    is_adapted: bool = False
    num_tokens: int = 12

    @property
    def min_tokens(self) -> int:
        """How many tokens come before a stop string is looked for."""
        return 0 if self.texts is not None else self.num_tokens * 3 // 4

    @property
    def texts(self) -> tuple[str, ...] | None:
        """What its reply may say; None: anything."""
        return next((TEXTS[kind] for kind in sorted(self.kinds) if kind in TEXTS), None)
