"""Chat templates that offer tools, each with calls in the form of a family of models. This module holds them, and what models write."""

from typing import NamedTuple

TURNS = r"""
{%- for message in messages -%}
  {%- if message.role == 'assistant' -%}
    {{- '<|im_start|>assistant\n' + message.content -}}
    CALLS
    {{- '<|im_end|>\n' -}}
  {%- elif message.role == 'tool' -%}
    {{- '<|im_start|>tool\n' + RESULT + '<|im_end|>\n' -}}
  {%- else -%}
    {{- '<|im_start|>' + message.role + '\n' -}}
    {%- if tools and loop.first -%}{{- OFFER -}}{%- for tool in tools -%}{{- tool | tojson + '\n' -}}{%- endfor -%}{%- endif -%}
    {{- message.content + '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
EACH = "{%- for call in message.tool_calls or [] -%}ONE{%- endfor -%}"


class Talk(NamedTuple):
    """A form of calls.

    Attributes:
      template: the chat template.
      form: its name in `serve.tools.FORMS`.
      call: how the model calls the tool `add` with {"a": 1, "b": "</tool_call> é"}, and
      then: how it goes on with a call of `add` with {}.
    """

    template: str
    form: str
    call: str
    then: str


def _template(one: str, offer: str = "tools:", result: str = "message.content") -> str:
    made = TURNS.replace("CALLS", EACH.replace("ONE", one))
    return made.replace("OFFER", f"'{offer}\\n'").replace("RESULT", result)


ARGUMENTS = '{"a": 1, "b": "</tool_call> é"}'
HERMES = _template(
    r"""{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}"""
    r"""{{- call.function.arguments | tojson + '}\n</tool_call>' -}}"""
)
MISTRAL = _template(
    """{{- ('[TOOL_CALLS][' if loop.first else ', ') + call.function | tojson + (']' if loop.last else '') -}}"""
)
ARGS = _template("""{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson -}}""")
LLAMA = _template(
    """{{- '{"name": "' + call.function.name + '", "parameters": ' + call.function.arguments | tojson + '}' -}}""",
    'Respond in the format {"name": ..., "parameters": ...}',
    "message.content | tojson",
)
QWEN_CODER = _template(
    r"""{{- '\n<tool_call>\n<function=' + call.function.name + '>\n' -}}"""
    r"""{%- for key, value in call.function.arguments.items() -%}"""
    r"""{{- '<parameter=' + key + '>\n' + (value if value is string else value | tojson) + '\n</parameter>\n' -}}{%- endfor -%}"""
    r"""{{- '</function>\n</tool_call>' -}}"""
)
GLM = _template(
    r"""{{- '\n<tool_call>' + call.function.name + '\n' -}}{%- for key, value in call.function.arguments.items() -%}"""
    r"""{{- '<arg_key>' + key + '</arg_key>\n<arg_value>' -}}"""
    r"""{{- (value if value is string else value | tojson) + '</arg_value>\n' -}}{%- endfor -%}{{- '</tool_call>' -}}"""
)
TALKS = {
    "qwen_coder": Talk(
        QWEN_CODER,
        "Qwen 3 Coder",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
        "<parameter=b>\n</tool_call> é\n</parameter>\n</function>\n</tool_call>",
        "\n<tool_call>\n<function=add>\n</function>\n</tool_call>",
    ),
    "glm": Talk(
        GLM,
        "GLM 4.5",
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
        "<arg_key>b</arg_key>\n<arg_value></tool_call> é</arg_value>\n</tool_call>",
        "\n<tool_call>add\n</tool_call>",
    ),
    "hermes": Talk(
        HERMES,
        "Hermes",
        f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>',
        '\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>',
    ),
    "mistral": Talk(
        MISTRAL,
        "Mistral",
        f'[TOOL_CALLS] [{{"name": "add", "arguments": {ARGUMENTS}}}',
        ', {"name": "add", "arguments": {}}]',
    ),
    "args": Talk(ARGS, "Mistral with [ARGS]", f"[TOOL_CALLS]add[ARGS]{ARGUMENTS}", "[TOOL_CALLS]add[ARGS]{}"),
    "llama": Talk(
        LLAMA, "Llama 3.1", f'{{"name": "add", "parameters": {ARGUMENTS}}}', '; {"name": "add", "parameters": {}}'
    ),
}
