"""What the templates of models with tags of their own write is read back, and written alike."""

import pytest

from tests.formats.round_trip import ALIKE, RoundTrips

DEEPSEEK = """\
{%- if tools %}{{ tools | tojson }}<@CALLS>{% endif %}
{%- for message in messages -%}
<{{ message.role }}>
{%- if message.role == 'assistant' %}<think>{{ message.reasoning_content or '' }}</think>{% endif %}
{{- message.content or '' }}
{%- if message.tool_calls %}{{ '\\n\\n' }}<@CALLS>
{% for call in message.tool_calls %}<@invoke name="{{ call.function.name }}">
{% for key, value in call.function.arguments.items() -%}
<@parameter name="{{ key }}" string="{{ 'true' if value is string else 'false' }}">
{{- value if value is string else value | tojson }}</@parameter>
{% endfor %}</@invoke>
{% endfor %}</@CALLS>
{%- endif %}<end>
{%- endfor %}
{%- if add_generation_prompt %}<assistant><think>{% endif %}""".replace("@", "\uff5cDSML\uff5c")


def dense(template):
    """As GLM 4.7 writes: without line breaks between tags."""
    for mark in ("</arg_key>", "</arg_value>", ".function.name }}"):
        template = template.replace(f"{mark}\n", f"{mark}{'{##}' * ('}' in mark)}")
    return template.replace("{{- '\\n' if message.content", "{{- '' if message.content")


GLM = """\
{%- if tools %}<|system|>{{ tools | tojson }}<tool_call>{% endif %}
{%- for message in messages -%}
<|{{ message.role }}|>
{%- if message.role == 'assistant' %}{{ '\\n' -}}
<think>{{ message.reasoning_content or '' }}</think>{{ '\\n' -}}
{%- endif %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first else '' }}<tool_call>{{ call.function.name }}
{% for key, value in call.function.arguments.items() -%}
<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}</tool_call>
{%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

KIMI_K2 = """\
{%- if tools %}<|im_system|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for message in messages -%}
<|im_{{ message.role }}|>
{%- if message.role == 'assistant' %}<think>{{ message.reasoning_content or '' }}</think>{% endif %}
{%- if message.role == 'tool' %}## Return of {{ message.tool_call_id + '\\n' }}{% endif %}
{{- message.content or '' }}
{%- if message.tool_calls %}<|tool_calls_section_begin|>
{%- for call in message.tool_calls -%}
<|tool_call_begin|>functions.{{ call.function.name }}:{{ loop.index0 }}
{{- '<|tool_call_argument_begin|>' }}{{ call.function.arguments | tojson }}<|tool_call_end|>
{%- endfor %}<|tool_calls_section_end|>
{%- endif %}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}<|im_assistant|>{% endif %}"""

MINIMAX_M2 = """\
{%- if tools %}]~b]system{{ tools | tojson }}<minimax:tool_call>[e~[{% endif %}
{%- for message in messages -%}
]~b]{{ message.role }}{{ '\\n' -}}
{%- if message.reasoning_content -%}
<think>{{ '\\n' + message.reasoning_content + '\\n' }}</think>{{ '\\n\\n' }}
{%- endif %}{{ message.content or '' }}
{%- if message.tool_calls %}{{ '\\n' if message.content else '' }}<minimax:tool_call>
{% for call in message.tool_calls %}<invoke name="{{ call.function.name }}">
{% for key, value in call.function.arguments.items() %}<parameter name="{{ key }}">
{{- value if value is string else value | tojson }}</parameter>
{% endfor %}</invoke>
{% endfor %}</minimax:tool_call>
{%- endif %}[e~[
{% endfor %}
{%- if add_generation_prompt %}]~b]assistant
{% endif %}"""

SEED_OSS = """\
{%- if tools %}{{ tools | tojson }}<seed:tool_call>{% endif %}
{%- for message in messages -%}
<seed:bos>{{ message.role + '\\n' }}
{%- if message.reasoning_content -%}
<seed:think>{{ message.reasoning_content }}</seed:think>{{ '\\n' }}
{%- endif %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- ('\\n\\n' if message.content else '') if loop.first else '\\n' }}<seed:tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>{{ value }}</parameter>
{% endfor %}</function>
</seed:tool_call>
{%- endfor %}<seed:eos>
{%- endfor %}
{%- if add_generation_prompt %}<seed:bos>assistant
{% endif %}"""

QWEN3_CODER = """\
{%- if tools %}Tools: {{ tools | tojson }}. Write <tool_call><function=a><parameter=b>.
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{%- if message.role == 'assistant' and message.reasoning_content %}
<think>
{{ message.reasoning_content }}
</think>
{% endif %}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '\\n\\n' if loop.first and message.content else '' if loop.first else '\\n' }}<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>
{{ value | tojson if value is mapping or (value is iterable and value is not string) else value }}
</parameter>
{% endfor %}</function>
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

TEMPLATES = [
    ("deepseek_v32", None, DEEPSEEK.replace("CALLS", "function_calls")),
    ("deepseek_v4", None, DEEPSEEK.replace("CALLS", "tool_calls")),
    ("glm", None, GLM),
    ("glm47", None, dense(GLM)),
    ("kimi_k2", None, KIMI_K2),
    ("minimax_m2", None, MINIMAX_M2),
    ("qwen3_coder", "<think>", QWEN3_CODER),
    ("seed_oss", "<seed:think>", SEED_OSS),
]


@pytest.mark.parametrize(
    ("name", "mark", "template"), TEMPLATES, ids=[name for name, *_ in TEMPLATES]
)
def test_what_a_template_writes_is_read_back_and_written_alike(name, mark, template):
    trips = RoundTrips(template)
    try:
        assert trips.choice.name == name
        assert mark in (None, trips.choice.marks.start)
        assert {trip[1:4] for trip in trips.all()} == {("", ALIKE, "")}
    finally:
        trips.close()
