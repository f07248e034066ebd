"""Chat templates make the prompts that transformers makes of them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from fabric_ray.serve.chat import ChatTemplate

FOUND = find_spec("vllm")
PUBLISHED = sorted(
    path
    for folder in (FOUND.submodule_search_locations or [] if FOUND else [])
    for path in Path(folder).glob("transformers_utils/chat_templates/*.jinja")
)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
CHATS = [
    [{"role": "user", "content": "hi"}],
    [
        {"role": "system", "content": "be <b>brief</b> & kind"},
        {"role": "user", "content": "  größer?\n"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "why"},
    ],
]
# What templates of large models do, beyond those that vLLM brings.
CONTROLS = """
{%- set ns = namespace(system='') %}
{% for message in messages %}
    {% if message['role'] == 'system' %}
        {% set ns.system = message.content | trim %}{% continue %}
    {% endif %}
    {%- if loop.index0 > 2 %}{% break %}{% endif %}
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
    {%- else %}{{ bos_token + message | tojson(indent=2) }}
    {%- endif %}
{% endfor %}
{{ ns.system }}{% if tools %}{{ tools }}{% endif %}
{%- if enable_thinking is defined %}<think>{% endif %}
{% if add_generation_prompt %}{{ eos_token }}
{% endif %}
"""


@pytest.mark.parametrize("chat", CHATS, ids=["one message", "four messages"])
@pytest.mark.parametrize(
    "source",
    [*[path.read_text() for path in PUBLISHED], CONTROLS],
    ids=[*[path.stem for path in PUBLISHED], "controls"],
)
def test_a_prompt_is_that_of_transformers(source: str, chat: list[dict[str, str]]) -> None:
    variables = {"enable_thinking": False}
    render: Any = chat_template_utils.render_jinja_template
    (theirs,), _ = render(
        [chat], chat_template=source, add_generation_prompt=True, **SPECIAL, **variables
    )
    assert ChatTemplate(source, special_tokens=SPECIAL).render(chat, variables) == theirs


def test_there_are_published_templates() -> None:
    assert PUBLISHED
