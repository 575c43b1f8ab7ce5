"""Chat templates of models: rendered in a sandbox, their errors told."""

from __future__ import annotations

import json

import pytest

from lezero.core.errors import ConfigError, FileError
from lezero.data.tokenizer import bytes_tokenizer
from lezero.serve.coder import Coder, open_coder

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HELLO = [{"role": "user", "content": "hi {{ 7 * 7 }}"}]


def coder(template: str | None) -> Coder:
    return Coder(bytes_tokenizer(), frozenset([256]), template, {"bos_token": "<s>"})


def test_a_chat_becomes_the_prompt_that_the_model_knows():
    expected = "<|im_start|>user\nhi {{ 7 * 7 }}<|im_end|>\n<|im_start|>assistant\n"
    assert coder(CHATML).prompt(HELLO) == expected
    assert (
        coder("{{ bos_token }}{{ messages[0].content | tojson }}").prompt(HELLO).startswith("<s>")
    )


def test_what_a_template_must_not_do():
    for hostile in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('system messages are not supported') }}",
        "{% for %}",
    ):
        with pytest.raises(ConfigError, match="messages: "):
            coder(hostile).prompt(HELLO)


def test_messages_are_checked():
    with pytest.raises(ConfigError, match="no chat template"):
        coder(None).prompt(HELLO)
    with pytest.raises(ConfigError, match="messages: got none"):
        coder(CHATML).prompt([])
    with pytest.raises(ConfigError, match=r"messages\[0\].content"):
        coder(CHATML).prompt([{"role": "user", "content": 3}])


def test_a_folder_brings_its_template_and_special_tokens(tmp_path):
    bytes_tokenizer().save(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    settings = {
        **json.loads(file.read_text()),
        "chat_template": CHATML,
        "bos_token": {"content": "<b>"},
    }
    file.write_text(json.dumps(settings))
    found = open_coder("", tmp_path)
    assert found.prompt(HELLO).startswith("<|im_start|>user")
    assert found.end_tokens == {256}
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}own")
    assert open_coder("", tmp_path).prompt(HELLO) == "<b>own"
    file.write_text("{")
    with pytest.raises(FileError):
        open_coder("", tmp_path)
