"""Bodies with something wrong at every place, and what a refusal must look like."""

BIG = 10**400
WRONG = [None, True, -1, 0, 2.5, BIG, "", "x" * 9, "\x00", [], [[]], [{}], {}, {"a": {"b": []}}]


def check(answer, status=400):
    """The body is an error of OpenAI's shape, of Anthropic's or of Ollama's; returns it."""
    assert answer.status == status
    assert answer.headers["Content-Type"].startswith("application/json")
    body = answer.json()
    error = body["error"]
    if "type" in body:
        assert body == {"type": "error", "error": error}
        assert error.keys() - {"details"} == {"type", "message"}
    elif isinstance(error, str):
        assert body == {"error": error}
        return {"message": error}
    else:
        assert body.keys() == {"error"}
        assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in error["message"]
    return error


def mutations(value):
    """`value` with one thing wrong, or at least odd, at every place."""
    yield from WRONG
    if isinstance(value, dict):
        yield {**value, "zzz": 1}
        for name, item in value.items():
            yield {k: v for k, v in value.items() if k != name}
            yield from ({**value, name: wrong} for wrong in mutations(item))
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from ([*value[:i], wrong, *value[i + 1 :]] for wrong in mutations(item))
