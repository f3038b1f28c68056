"""A model that says what it is told to, and a chat template for it."""

import json
import shutil
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from llguidance import LLMatcher

import aioserve
from aioserve.config import EngineConfig, ModelConfig, ServerConfig
from aioserve.features.grammars import GrammarCompiler
from aioserve.model_source.info import ModelInfo
from aioserve.runner.simulated import SimulatedRunner
from tests.seeing_models import make_seeing_model
from tests.server.serving import SIMULATED, running
from tests.tokenizing import share_tokenizer

EMBEDDED = Path(aioserve.__file__).parent / "model_source" / "embedded"

HERMES = """
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}
    {%- if loop.index0 % 2 and message.role == "user" %}
        {{- raise_exception("users and assistants take turns") }}{% endif %}
    {{- '<|user|>' ~ message.role ~ (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' ~ call.function.arguments | tojson ~ '</tool_call>' }}{% endfor %}
    {{- message.name or '' }}{{ message.reasoning_content or '' }}
{%- endfor %}{{ '<|assistant|>' }}"""
#: As Qwen writes it, for agents: messages of the system stand where they are.
CHATML = """
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\n' }}
    {%- if message.reasoning_content %}
        {{- '<think>\n' ~ message.reasoning_content ~ '\n</think>\n\n' }}{% endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' ~ call.function.arguments | tojson ~ '</tool_call>' }}{% endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}{{ '<|im_start|>assistant\n' }}"""
#: As many models': the system speaks first or not at all.
SYSTEM_FIRST = (
    """
{%- if messages[1:] | selectattr("role", "equalto", "system") | list %}
    {{- raise_exception("System message must be at the beginning.") }}{% endif %}"""
    + CHATML
)
#: The same of a model that sees.
SEEING = SYSTEM_FIRST.replace(
    "{{- message.content }}",
    """{%- if message.content is string %}{{ message.content }}{% else %}
        {%- for part in message.content %}
            {{- part.text if part.type == 'text' else '<image>' }}{% endfor %}{% endif %}""",
)
THINKING = HERMES + "{{ '<think>\n' }}"
TWO_CALLS = (
    'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "sub", "arguments": {"ä": [2, "</tool_call>"]}}\n</tool_call>'
)


def make_model(path: Path, template: str, special: str = "<|pad|>") -> str:
    """The files of a model with another chat template and a special token; no weights."""
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, path)
    tokenizer = json.loads((EMBEDDED / "tokenizer.json").read_text())
    tokenizer["added_tokens"][0]["content"] = special
    del tokenizer["model"]["vocab"]["<|pad|>"]
    tokenizer["model"]["vocab"][special] = 0
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "pad_token": special}))
    (path / "chat_template.jinja").write_text(template)
    share_tokenizer(path)
    return str(path)


def make_seeing_files(path: Path, template: str, special: str = "") -> str:
    """The files of a model that sees, with this chat template."""
    eos = json.loads((EMBEDDED / "config.json").read_text())["eos_token_id"]
    make_seeing_model("idefics3", path, eos_token_id=eos, max_position_embeddings=4096)
    (path / "chat_template.jinja").write_text(template)
    return str(path)


class ScriptedRunner(SimulatedRunner):
    """Says what it is told to, whatever it is asked; a step fails if a grammar forbids it."""

    def __init__(self, config: EngineConfig, model: ModelConfig) -> None:
        info = ModelInfo(model)
        super().__init__(config, info)
        self.info = msgspec.structs.replace(self.info, supports_images=True)
        self._tokenizer = info.tokenizer
        self._scripts: list[list[int]] = []  # of the next requests; the last one stays
        self._said: dict[int, tuple[object, list[int]]] = {}  # by id of its row, which is kept
        self._is_plain = False  # each token is asked for
        self._prompts: list[list[int]] = []
        self.grammars = GrammarCompiler(info)
        self._matchers: dict[int, tuple[object, LLMatcher]] = {}  # as `_said`

    def say(self, *texts: str, slowdown: float = 1) -> None:
        """The next request is answered by the first text, those after it by the others; what runs
        says its own to the end. A step takes `slowdown` times its time.
        """
        self.slowdown = slowdown
        encode = self._tokenizer.encode
        scripts = [encode(text, add_special_tokens=False) for text in texts]
        self._scripts = [[*script, self._tokenizer.eos_token_id] for script in scripts]
        self._prompts.clear()
        self._matchers.clear()

    def prompts(self) -> list[str]:
        """What the requests since `say` asked, as the chat template wrote it."""
        return [self._tokenizer.decode(ids) for ids in self._prompts]

    async def load(self):
        await self.grammars.prepare()
        return await super().load()

    async def close(self):
        self.grammars.close()
        await super().close()

    def _update_rows(self, scheduled):
        computed = super()._update_rows(scheduled)
        for new in scheduled.scheduled_new_reqs:
            self._prompts.append(new.token_ids[: new.num_prompt_tokens])
            if (wanted := new.sampling_params.structured_outputs) is not None:
                row = self._rows[new.request_id]
                self._matchers[id(row)] = row, self.grammars.matcher(wanted)
        return computed

    def _sample(self, row):
        if id(row) not in self._said:
            is_last = len(self._scripts) == 1
            self._said[id(row)] = row, self._scripts[0] if is_last else self._scripts.pop(0)
        position = row.num_tokens - row.num_prompt_tokens
        row.num_tokens += 1
        token_id = self._said[id(row)][1][position]
        if id(row) in self._matchers:
            _, matcher = self._matchers[id(row)]
            is_end = token_id == self._tokenizer.eos_token_id and matcher.is_stopped()
            allowed = is_end or matcher.consume_tokens([token_id])
            # Agents ask for more than a test knows of, such as a title, as JSON: that reply is
            # empty. An error would end every request of the step.
            if not allowed and position == 0:
                return self._tokenizer.eos_token_id
            assert allowed, f"token {position} of the script is forbidden: {matcher.get_error()}"
        return token_id


@asynccontextmanager
async def saying(
    text,
    path,
    template,
    special="<|pad|>",
    name="embedded",
    max_model_len=None,
    make=make_model,
    step_ms=0,
    **settings,
):
    """A server of a model of this name that says `text`, whatever it is asked; `server.say` it
    another. `make` makes its files. A step takes `step_ms`; 0: as long as its work."""
    files = make(path, template, special)
    model = ModelConfig(model=files, served_model_name=name, max_model_len=max_model_len)
    times = msgspec.structs.replace(SIMULATED.runner, step_base_ms=step_ms)
    server = ServerConfig(**settings)
    config = msgspec.structs.replace(SIMULATED, model=model, runner=times, server=server)
    runner = ScriptedRunner(config, model)
    runner.say(text)
    async with running(config, runner) as server:
        server.say, server.prompts = runner.say, runner.prompts
        yield server
