"""What harmony says about the grammar of a reply: headers and messages as rules, and as text.

Knows no reader: `aioserve.formats.harmony` reads.
"""

from collections.abc import Sequence

from aioserve.formats import (
    Beginning,
    CallParser,
    Function,
    Literal,
    Marks,
    Reply,
    dumps,
    json_rule,
    repeated,
    text_until,
)

START, CHANNEL, TYPE, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
CHANNELS = ("analysis", "commentary", "final")
ASSISTANT, FUNCTIONS = "assistant", "functions."


class HarmonyGrammar(CallParser):
    """How replies are bound and written in harmony."""

    markers = (START, CHANNEL, TYPE, MESSAGE, *ENDS)
    reads_reasoning = True
    thinking = Marks(f"{CHANNEL}analysis{MESSAGE}", END, is_repeated=True)
    after_thinking = f"{START}{ASSISTANT}"

    @classmethod
    def evidence(cls, template: str) -> str | None:
        return CHANNEL if CHANNEL in template and MESSAGE in template else None

    @classmethod
    def grammar(cls, functions: Sequence[Function], is_parallel: bool, literal: Literal) -> str:
        each = " | ".join(f"call_{i}" for i in range(len(functions)))
        between = f"({literal(CALL)} | {literal(END)}) {literal(START + ASSISTANT)}"
        kind = f'(" "? {literal(TYPE)} "json" | " json")?'
        rules = [
            f"calls: {repeated(f'({each})', between, is_parallel)} {literal(CALL)}?",
            f"kind: {kind} {literal(MESSAGE)}",
            f"other: ({' | '.join(map(literal, CHANNELS))}) kind (body | REST)",
            text_until("body", END, literal),
            r"REST: /(.|\n)+/",  # the last one, which has not ended
        ]
        for i, function in enumerate(functions):
            to, commentary = literal(f" to={FUNCTIONS}{function.name}"), literal("commentary")
            rules += [
                f"call_{i}: {to} {literal(CHANNEL)} {commentary} bound_{i} "
                f"| {literal(CHANNEL)} {commentary} {to} bound_{i}",
                f"bound_{i}: kind arguments_{i}",
                f"arguments_{i}: {json_rule(function.parameters)}",
            ]
        return "\n".join(rules)

    @classmethod
    def beginnings(cls, functions: Sequence[Function], literal: Literal) -> list[Beginning]:
        """A channel, which may be another; and a recipient that stands before one."""
        channel, commentary = literal(CHANNEL), literal("commentary")
        names = [literal(function.name) for function in functions]
        end = f"({' | '.join(map(literal, ENDS))})?"
        first = " | ".join(
            f"{name} {channel} {commentary} bound_{i}" for i, name in enumerate(names)
        )
        to = f" to={FUNCTIONS}"
        then = " | ".join(f"{literal(to)} {name} bound_{i}" for i, name in enumerate(names))
        opened = f"({commentary} ({then}) | other) {end}"
        # Where marks are tokens, text before a channel may be a recipient: there is none.
        is_text = not channel.startswith("<")
        role = literal(ASSISTANT)
        return [
            Beginning(channel, opened, has_text=is_text),
            Beginning(literal(to), f"({first}) {end}", has_text=is_text),
            Beginning(
                literal(START),
                f"{role} ({channel} {opened} | {literal(to)} ({first}) {end})",
            ),
        ]

    @classmethod
    def reasoning_rules(cls, literal: Literal) -> str:
        opening, next_one = literal(f"{CHANNEL}analysis{MESSAGE}"), literal(START + ASSISTANT)
        thought = text_until("thought", END, literal)
        return f"reasoning: ({opening} thought {next_one})*\n{thought}"

    @classmethod
    def answer_rules(cls, literal: Literal) -> str:
        final = f'{literal(f"{CHANNEL}final")} ({literal(TYPE)} "json")?'
        return f"answer: {final} {literal(MESSAGE)} content"

    @classmethod
    def write(cls, reply: Reply) -> str:
        said = []
        if reply.reasoning:
            said.append((f"{CHANNEL}analysis{MESSAGE}{reply.reasoning}", END))
        if reply.content:
            channel = "commentary" if reply.calls else "final"
            said.append((f"{CHANNEL}{channel}{MESSAGE}{reply.content}", END))
        for call in reply.calls:
            header = f" to={FUNCTIONS}{call.name}{CHANNEL}commentary json{MESSAGE}"
            said.append((f"{header}{dumps(call.arguments)}", CALL))
        text = "".join(f"{message}{end}{START}{ASSISTANT}" for message, end in said[:-1])
        return text + said[-1][0] if said else ""
