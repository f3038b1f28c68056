"""What the latencies in tables are, in the same words below each of them.

Knows labels; knows no numbers.
"""

#: By label, a sentence each for a reader who has not met them.
DURATIONS = {
    "TTFT": "Time to first token: from the arrival of a request to its first token.",
    "TPOT": "Time per output token: the mean time from one token to the next within a request.",
    "gap": "From one token to the next, over all tokens of all requests: a long one is a stall.",
    "end to end": "From the arrival of a request to its last token, of those that got there.",
}


def legend(labels: list[str]) -> str:
    """A line for each latency that one of `labels` begins with."""
    width = max(map(len, DURATIONS))
    return "\n".join(
        f"{word:{width}}  {meaning}"
        for word, meaning in DURATIONS.items()
        if any(label.startswith(word) for label in labels)
    )
