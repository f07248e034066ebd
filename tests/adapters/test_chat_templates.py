"""Chat templates make the prompts that transformers makes of them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from fabric_ray.inference.tokenizer import load_tokenizer
from fabric_ray.serve.chat import ChatTemplate, load_chat_template

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


def saved(folder: Path) -> Any:
    """A tokenizer whose special tokens go around each text, and its chat template, in a folder."""
    words = ["<s>", "</s>", "<unk>", "be", "kind", "hi", "yes", "why", "<pad>"]
    numbers = {word: at for at, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    around = [("<s>", numbers["<s>"]), ("</s>", numbers["</s>"])]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=around
    )
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}yes{% endif %}"
    )
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **SPECIAL)
    theirs.save_pretrained(folder)
    return theirs


@pytest.mark.parametrize("chat", CHATS, ids=["one message", "four messages"])
def test_a_saved_checkpoint_gives_the_tokens_of_transformers(
    chat: list[dict[str, str]], tmp_path: Path
) -> None:
    theirs = saved(tmp_path).apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False
    )
    template = load_chat_template(tmp_path)
    assert template is not None
    ours = load_tokenizer(tmp_path, vocab=None).encode(template.render(chat), special=False)
    assert ours == theirs


def test_there_are_published_templates() -> None:
    assert PUBLISHED
