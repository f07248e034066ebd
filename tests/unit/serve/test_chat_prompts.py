"""Chat templates of checkpoints, and the messages that they are given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from fabric_ray.inference.errors import InferenceError
from fabric_ray.inference.tokenizer import ByteTokenizer
from fabric_ray.serve import BadRequest, ServeArgs, build_app
from fabric_ray.serve.chat import ChatTemplate, check_messages, load_chat_template
from fabric_ray.serve.openai import ChatBody

# What published templates use: loops with controls, whitespace, tojson, special tokens, errors.
CHATML = """\
{%- for message in messages -%}
    {%- if message.role == 'system' and not loop.first -%}
        {{ raise_exception('the system speaks first') }}
    {%- endif -%}
    {{ '<|im_start|>' + message.role + '\\n' + message.content + eos_token + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
HI = [{"role": "user", "content": "hi <&>"}]
PROMPT = "<|im_start|>user\nhi <&><|im_end|>\n<|im_start|>assistant\n"


def checkpoint(folder: Path, **config: Any) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def prompt(directory: Path | None, **given: Any) -> str:
    template = load_chat_template(directory, **given)
    assert template is not None
    return template.render(HI)


def test_the_checkpoints_template_is_in_its_configuration(tmp_path: Path) -> None:
    token = {"content": "<|im_end|>", "special": True}
    assert prompt(checkpoint(tmp_path, chat_template=CHATML, eos_token=token)) == PROMPT
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    assert prompt(checkpoint(tmp_path, chat_template=named, eos_token="<|im_end|>")) == PROMPT


def test_or_in_a_file_of_its_own(tmp_path: Path) -> None:
    checkpoint(tmp_path, chat_template="old", eos_token="<|im_end|>")
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    assert prompt(tmp_path) == PROMPT
    other = tmp_path / "mine.jinja"
    other.write_text("{{ messages[0].content }}")
    assert prompt(tmp_path, file=other) == "hi <&>"
    assert prompt(None, file=other) == "hi <&>"


def test_special_tokens_of_older_checkpoints_have_a_file_of_their_own(tmp_path: Path) -> None:
    checkpoint(tmp_path, chat_template=CHATML)
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    assert prompt(tmp_path) == PROMPT


def test_without_a_template_a_chat_is_told_what_to_do(tmp_path: Path) -> None:
    assert load_chat_template(None) is None
    assert load_chat_template(checkpoint(tmp_path, eos_token="</s>")) is None
    with pytest.raises(BadRequest, match=r"chat_template\.jinja"):
        ChatBody(messages=HI).tokens(ByteTokenizer(), None)


def test_templates_have_what_transformers_gives_them() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}"
        "{{ strftime_now('%Y') | length }}{{ tools is none }}{{ undefined_thing }}"
    )
    assert ChatTemplate(source).render(HI * 2) == json.dumps(HI[0]) + "4True"


def test_what_a_template_refuses_is_the_clients_to_change() -> None:
    wrong = [*HI, {"role": "system", "content": "late"}]
    with pytest.raises(BadRequest, match="the system speaks first"):
        ChatTemplate(CHATML, special_tokens={"eos_token": "<|im_end|>"}).render(wrong)
    with pytest.raises(BadRequest):
        ChatTemplate("{{ messages[0].content + 1 }}").render(HI)


def test_a_template_cannot_leave_its_sandbox() -> None:
    with pytest.raises(BadRequest, match="unsafe"):
        ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}").render(HI)


def test_a_file_that_cannot_be_read_is_told_before_anything_starts(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for m in messages %}")
    for file in (broken, tmp_path / "missing.jinja"):
        with pytest.raises(InferenceError, match=file.name):
            build_app(ServeArgs(chat_template=str(file)))


def test_messages_are_text_or_parts_of_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    said = [
        {"role": "developer", "content": "be brief", "name": "d"},
        {"role": "user", "content": parts},
        # An answer of this server, sent back.
        {"role": "assistant", "content": "ok", "refusal": None, "tool_calls": []},
    ]
    assert check_messages(said) == [
        {"role": "developer", "content": "be brief", "name": "d"},
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": "ok"},
    ]


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": [IMAGE]}, r"messages\[0\]\.content\[0\].*image_url.*text"),
        ({"role": "user", "content": ["a"]}, r"content\[0\]"),
        ({"role": "user", "content": [{"type": "text"}]}, r"content\[0\]\.text"),
        ({"role": "user", "content": 5}, r"messages\[0\]\.content"),
        ({"role": "user"}, r"messages\[0\]\.content"),
        ({"content": "x"}, r"messages\[0\]\.role"),
        ({"role": "tool", "content": "x"}, r"role.*'tool'"),
        ({"role": "user", "content": "x", "name": 5}, r"messages\[0\]\.name"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "tool_calls"),
        ({"role": "assistant", "content": "x", "reasoning_content": "y"}, "reasoning_content"),
    ],
)
def test_what_a_model_of_text_cannot_read_is_refused(message: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest, match=said) as caught:
        check_messages([message])
    assert caught.value.fields["param"] == "messages"


def test_a_chat_has_a_message() -> None:
    with pytest.raises(BadRequest):
        check_messages([])
