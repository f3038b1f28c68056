"""Keeps what the package openai-harmony reads in replies, to compare with ours.

`python -m tests.formats.harmony_reference` writes it anew. That needs openai-harmony 0.0.8, and a
folder with o200k_base.tiktoken in TIKTOKEN_ENCODINGS_BASE; the npm package tiktoken 1.0.22 has that
vocabulary in encoders/o200k_base.json.
"""

import json
import random
from pathlib import Path

SEED, NUM_TEXTS = 1, 60
TEXTS = ["Hm.", "2 + 2 = 4.", "\u00e4 \U0001f600\n\nx", "to=functions.add", '{"q": 1}', "a < b"]
ARGUMENTS = ['{"a": 1}', '{"a": "x\\"}\u00e4", "b": [1, {"c": null}]}', "{}", '{\n  "a": 1\n}', ""]
TYPES = ["", " json", " <|constrain|>json", "<|constrain|>json", " code"]


def message(rng: random.Random) -> str:
    """One message without its end; the tools of a model itself are no part of it."""
    kind = rng.choice(["analysis", "final", "commentary", "call", "call"])
    if kind != "call":
        return f"<|channel|>{kind}<|message|>{rng.choice(TEXTS)}"
    to = f" to=functions.{rng.choice(['add', 'get_weather'])}"
    channel = f"<|channel|>{rng.choice(['commentary', 'commentary', 'analysis'])}"
    header = rng.choice([to + channel, channel + to])
    return f"{header}{rng.choice(TYPES)}<|message|>{rng.choice(ARGUMENTS)}"


def reply(rng: random.Random) -> str:
    """A reply of some messages; the last one may lack its end."""
    messages = [
        message(rng) + rng.choice(["<|end|>", "<|call|>", "<|return|>"])
        for _ in range(rng.randint(1, 4))
    ]
    text = "<|start|>assistant".join(messages)
    return text if rng.random() < 0.5 else text[: text.rindex("<|")]


def main() -> None:
    """Write the file anew."""
    from openai_harmony import HarmonyEncodingName, Role, load_harmony_encoding

    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    rng, kept = random.Random(SEED), []
    for text in (reply(rng) for _ in range(NUM_TEXTS)):
        tokens = encoding.encode(text, allowed_special="all")
        read = encoding.parse_messages_from_completion_tokens(tokens, Role.ASSISTANT)
        messages = [
            {"channel": m.channel, "recipient": m.recipient, "text": m.content[0].text}
            for m in read
        ]
        kept.append([text, messages])
    path = Path(__file__).with_name("harmony_reference.json")
    path.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
