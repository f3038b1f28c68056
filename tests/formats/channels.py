"""A format that reads whole replies: every message names its channel, as in gpt-oss's harmony.

`<|channel|>thought<|text|>Hm.<|done|><|channel|>call add<|text|>{"a": 1}<|done|>`; text outside of
channels is content.
"""

from aioserve.features.formats import (
    Beginning,
    Call,
    CallParser,
    JsonValue,
    Reasoning,
    any_of,
    dumps,
    json_rule,
    overlap,
    repeated,
    text_until,
)

CHANNEL, TEXT, END = "<|channel|>", "<|text|>", "<|done|>"
_OPENING, _TEXT, _END = map(any_of, ([CHANNEL], [TEXT], [END]))


class ChannelFormat(CallParser):
    """Thoughts, calls and the answer, each in a channel."""

    markers = (CHANNEL, TEXT, END)
    reads_reasoning = True

    @classmethod
    def evidence(cls, template):
        return CHANNEL if CHANNEL in template else None

    @classmethod
    def _call_rules(cls, functions, literal):
        rules = [f"arguments_{i}: {json_rule(f.parameters)}" for i, f in enumerate(functions)]
        names = [f"{literal(f'call {f.name}')} {literal(TEXT)} arguments_{i}"
                 for i, f in enumerate(functions)]  # fmt: skip
        others = " | ".join(literal(name + TEXT) for name in ("thought", "answer"))
        return [
            f"opened: ({' | '.join(names)}) {literal(END)}",
            f"other: ({others}) body",
            text_until("body", END, literal),
            *rules,
        ]

    @classmethod
    def grammar(cls, functions, is_parallel, literal):
        calls = repeated("call", literal(""), is_parallel)
        call = f"call: {literal(CHANNEL)} opened"
        return "\n".join([f"calls: {calls}", call, *cls._call_rules(functions, literal)])

    @classmethod
    def beginnings(cls, functions, literal):
        # What is no call has its own text, in which special tokens may stand.
        return [Beginning(literal(CHANNEL), "(opened | other)")]

    @classmethod
    def reasoning_rules(cls, literal):
        begin = literal(f"{CHANNEL}thought{TEXT}")
        return f"reasoning: ({begin} thought)?\n{text_until('thought', END, literal)}"

    @classmethod
    def answer_rules(cls, literal):
        return f"answer: {literal(f'{CHANNEL}answer{TEXT}')} content {literal(END)}"

    @classmethod
    def write(cls, reply):
        said = [("thought", reply.reasoning), ("answer", reply.content)]
        said += [(f"call {call.name}", dumps(call.arguments)) for call in reply.calls]
        return "".join(f"{CHANNEL}{name}{TEXT}{text}{END}" for name, text in said if text)

    def begin(self):
        return self.read_content(_OPENING, self._open)

    def _open(self):
        self._name = []
        self.state = self._read_name
        return True

    def _read_name(self):
        found = _TEXT.search(self.text, self.at)
        end = len(self.text) - overlap(self.text, [TEXT], self.at) if not found else found.start()
        self._name.append(self.take(end))
        if found is None:
            return False
        self.take(found.end())
        kind, _, name = "".join(self._name).partition(" ")
        if kind == "call" and name in self.functions:
            self.tell([Call(name)])
            self.value = JsonValue()
            self.state = self._read_call
        elif kind in ("thought", "answer"):
            self.held = None
            self.state = self._think if kind == "thought" else self._answer
        else:
            self.give_back()
            self.state = self.begin
        return True

    def _read_call(self):
        return self.read_arguments(then=self._close)

    def _close(self):
        if self.skip_end(END) is None:
            return False
        self.state = self.begin
        return True

    def _think(self):
        return self._read_to_end(lambda text: self.events.append(Reasoning(text)))

    def _answer(self):
        return self._read_to_end(self.say)

    def _read_to_end(self, say):
        found = _END.search(self.text, self.at)
        held = 0 if self.is_last else overlap(self.text, [END], self.at)
        text = self.take(found.start() if found else len(self.text) - held)
        if text:
            say(text)
        if found:
            self.take(found.end())
            self.state = self.begin
        return found is not None
