"""--chat-template: a file in the place of the model's own template."""

from pathlib import Path

import pytest

from aioserve import AsyncEngine, EngineConfig
from aioserve.config import ModelConfig, RunnerConfig
from aioserve.errors import ConfigError

TEMPLATE = """\
{%- for message in messages %}<{{ message.role }}> {{ message.content }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


async def test_a_file_writes_the_prompts_in_the_place_of_the_models_template(
    start_server, tmp_path: Path
) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(TEMPLATE)
    messages = [{"role": "user", "content": "Who's there?"}]
    async with start_server(model={"chat_template": str(path)}) as server:
        answer = await server.request("POST", "/tokenize", json={"messages": messages})
        text = "<user> Who's there?\n<assistant>"
        assert (
            answer.json()["tokens"]
            == (await server.request("POST", "/tokenize", json={"prompt": text})).json()["tokens"]
        )
        assert (await server.chat("Who's there?", max_tokens=3)).status == 200


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"model.chat_template: there is no file .*mine.jinja"),
        (b"\xff\xfe", r"model.chat_template: cannot read .*mine.jinja: .*utf-8"),
        (b"a\n{% for x in y %}\n", r"model.chat_template: .*mine.jinja, line 2: .*endfor"),
        (b"{% generate %}", r"model.chat_template: .*mine.jinja, line 1: .*unknown tag 'generate'"),
    ],
)
async def test_a_file_that_is_no_template_is_refused_before_anything_is_loaded(
    text: bytes | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.jinja"
    if text is not None:
        path.write_bytes(text)
    engine = AsyncEngine(EngineConfig(model=ModelConfig(chat_template=str(path))))
    with pytest.raises(ConfigError, match=message) as caught:
        await engine.start()
    assert "\n" not in str(caught.value)


async def test_a_template_without_a_tokenizer_has_no_effect_and_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(TEMPLATE)
    model = ModelConfig(chat_template=str(path), skip_tokenizer_init=True)
    engine = AsyncEngine(EngineConfig(model=model, runner=RunnerConfig(runner="simulated")))
    with pytest.raises(ConfigError, match=r"chat_template .* no effect: .*skip_tokenizer_init"):
        await engine.start()
