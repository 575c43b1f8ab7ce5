"""Chat templates of models: rendered in a sandbox, their errors told."""

from __future__ import annotations

import json
import os

import pytest
import tokenizers
import transformers

from lezero.core.errors import ConfigError, FileError
from lezero.data.tokenizer import bytes_tokenizer, train_tokenizer
from lezero.serve import template
from lezero.serve.coder import Coder, open_coder
from lezero.serve.llm import LLM
from lezero.serve.offline import answer_lines
from lezero.serve.sampling import SamplingParams
from tests.serve.models import small
from tests.serve.server.running import serving

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


@pytest.mark.parametrize("nothing", ["", "{% if false %}x{% endif %}", "{# {{ messages }} #}"])
def test_a_template_that_yields_nothing_is_told(nothing):
    llm = LLM(small(vocab=257), coder=coder(nothing), weights="bf16")
    said = "messages: the model's chat template gives no text for them"
    for ask in (llm.chat, llm.chat_tokens):
        with pytest.raises(ConfigError, match=f"^{said}$"):
            ask(HELLO)
    (line,) = answer_lines(llm, [json.dumps({"messages": HELLO})])
    assert line["error"] == f"line 1: {said}"
    with serving(llm) as client:
        found = client.ask("/v1/chat/completions", {"messages": HELLO})
    assert (found.status, found.error["param"], found.error["message"]) == (400, "messages", said)
    assert llm.coder is not None
    assert llm.coder.encode("") == []


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


@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize("settings", [{}, {"add_bos_token": False}, {"add_bos_token": True}])
def test_a_prompt_begins_as_the_model_was_taught(tmp_path, settings, starts):
    """As transformers reads the same folder: tokenizer.json alone says how. Runs were trained
    without start tokens."""
    tokenizer = train_tokenizer(["a few words, a few more words"] * 9, 300)
    tokenizer.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    inner = tokenizers.Tokenizer.from_file(str(file))
    inner.add_special_tokens(["<s>"])
    bos = inner.token_to_id("<s>")
    if starts:
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", bos)]
        )
    inner.save(str(file))
    told = tmp_path / "tokenizer_config.json"
    told.write_text(json.dumps({**json.loads(told.read_text()), "bos_token": "<s>", **settings}))
    coder = open_coder(tmp_path, tmp_path)
    words = inner.encode("a few words", add_special_tokens=False).ids
    assert coder.encode("a few words") == [bos] * starts + words
    assert coder.encode("<s>a few words") == [bos, *words]
    assert open_coder(tmp_path / "run", tmp_path).encode("a few words") == words
    there = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert coder.encode("a few words") == there("a few words").input_ids


@pytest.mark.parametrize("listed", [{}, {"added_tokens_decoder": {}}])
def test_a_template_sees_the_special_tokens_that_transformers_knows(tmp_path, listed):
    train_tokenizer(["a few words, a few more words"] * 9, 300).save(tmp_path)
    names = ("bos", "eos", "unk", "pad", "cls", "sep", "mask", "image", "video", "voice")
    template = "".join(f"[{{{{ {name}_token }}}}]" for name in names)
    file = tmp_path / "tokenizer_config.json"
    own = {"bos_token": {"content": "<s>", "__type": "AddedToken"}, "image_token": "<image>"}
    own |= {"extra_special_tokens": {"voice_token": "<voice>"}, "sep_token": None, **listed}
    given = {**json.loads(file.read_text()), **own, "chat_template": template}
    file.write_text(json.dumps(given))
    named = {f"{name}_token": f"<{name}>" for name in ("bos", "unk", "pad", "mask", "video")}
    named |= {"cls_token": {"content": "<cls>", "lstrip": False}, "eos_token": "<|endoftext|>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(HELLO, tokenize=False)
    assert open_coder("", tmp_path).prompt(HELLO) == expected
    assert ("<cls>" in expected) == (not listed)


@pytest.mark.parametrize("begins", ["", "{{ bos_token }}"])
def test_a_chat_begins_as_its_template_writes_and_transformers_reads(tmp_path, begins):
    train_tokenizer(["a few words, a few more words"] * 9, 300).save(tmp_path)
    file, settings = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    inner = tokenizers.Tokenizer.from_file(str(file))
    inner.add_special_tokens(["<s>"])
    starts = [("<s>", inner.token_to_id("<s>"))]
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=starts
    )
    inner.save(str(file))
    template = {"chat_template": begins + "{{ messages[0].content }}", "bos_token": "<s>"}
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **template}))
    found = open_coder(tmp_path, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    llm = LLM(small(vocab=301), coder=found, weights="bf16")
    given = [{"role": "user", "content": "a few words"}]
    expected = theirs.apply_chat_template(given, return_dict=False)
    assert llm.chat_tokens(given) == expected
    assert found.encode("a few words") == theirs("a few words")["input_ids"]
    params = SamplingParams(max_tokens=1)
    assert llm.chat(given, params).prompt_tokens == len(expected)
    (line,) = answer_lines(llm, [json.dumps({"messages": given})], params)
    assert line["prompt_tokens"] == len(expected)
    with serving(llm) as client:
        asked = client.ask("/v1/chat/completions", {"messages": given, "max_tokens": 1})
    assert asked.json["usage"]["prompt_tokens"] == len(expected)


SAYS = "{% for m in messages %}{{ m.role }}{% if m.name %}({{ m.name }}){% endif %}: "
PARTS = "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
PARTS += "[{{ p.type }}]{{ p.text }}{% endfor %}{% endif %}"


@pytest.mark.parametrize(
    "content", [PARTS, "{{ m.content }}", "{{ m.content | tojson }}", "{{ '' + m.content }}"]
)
def test_names_and_parts_are_what_the_template_makes_of_them(tmp_path, content):
    train_tokenizer(["a few words, a few more words"] * 9, 300).save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(f"{SAYS}{content}\n{{% endfor %}}")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    llm = LLM(small(vocab=301), coder=open_coder("", tmp_path), weights="bf16")
    parts = [{"type": "text", "text": "a few "}, {"type": "text", "text": "words"}]
    given = [{"role": "user", "content": parts, "name": "bob"}, {"role": "user", "content": "x"}]
    whole = [{**given[0], "content": "a few words"}, given[1]]
    read = given if content == PARTS else whole
    expected = theirs.apply_chat_template(read, return_dict=False)
    assert llm.chat_tokens(given) == expected
    with serving(llm) as client:
        asked = client.ask("/v1/chat/completions", {"messages": given, "max_tokens": 1})
        assert asked.json["usage"]["prompt_tokens"] == len(expected)
        wrong = [{**given[0], "name": 3}]
        refused = client.ask("/v1/chat/completions", {"messages": wrong})
        assert refused.error["param"] == "messages[0].name"
    with pytest.raises(ConfigError, match=r"content\[0\]: got a part of type 'image'"):
        llm.chat_tokens([{"role": "user", "content": [{"type": "image"}]}])


ALL_PARTS = "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ p.text }}{% endfor %}"
ALL_PARTS += "{% endfor %}"
FIRST = "{% if messages[0].role != 'system' %}{{ raise_exception('first') }}{% endif %}" + ALL_PARTS
LAST = "{% if messages | length < 2 %}{{ raise_exception('more') }}{% endif %}" + ALL_PARTS
OF_USERS = "{{ messages[0].content }}{% for p in messages[1].content %}{{ p.text }}{% endfor %}"
ONE = "{{ messages[0].content + ' ' + messages[1].content }}"


@pytest.mark.parametrize("template", [ALL_PARTS, FIRST, LAST, OF_USERS, ONE])
def test_no_text_of_parts_is_lost(template):
    texts = {"system": "Be brief.", "user": "What is 2+2?"}
    parts = [
        {"role": role, "content": [{"type": "text", "text": text}]} for role, text in texts.items()
    ]
    found = coder(template).prompt(parts)
    assert all(text in found for text in texts.values())
    assert "'text'" not in found


def test_marks_of_all_messages_are_found_at_once(monkeypatch):
    """Looking for those of each message alone took 10 s for a body of a megabyte."""
    sought = []

    class Rendering(str):
        def __contains__(self, mark):
            sought.append(mark)
            return super().__contains__(mark)

    monkeypatch.setattr(
        "lezero.serve.coder.render", lambda *given: Rendering(template.render(*given))
    )
    parts = [{"role": "user", "content": [{"type": "text", "text": str(i)}]} for i in range(200)]
    found = coder(f"{SAYS}{PARTS}{{% endfor %}}").prompt(parts)
    assert found == "".join(f"user: [text]{i}" for i in range(200))
    assert len(sought) < 10


def test_a_template_of_its_own_needs_no_settings_beside_it(tmp_path):
    train_tokenizer(["a few words, a few more words"] * 9, 300).save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert open_coder("", tmp_path).prompt(HELLO) == "hi {{ 7 * 7 }}!"


def test_a_template_of_its_own_is_a_file_of_a_bounded_size(tmp_path):
    bytes_tokenizer().save(tmp_path)
    template = tmp_path / "chat_template.jinja"
    template.touch()
    os.truncate(template, 1 << 40)
    with pytest.raises(FileError, match=r"chat_template\.jinja: larger than 1 MiB"):
        open_coder("", tmp_path)
    template.unlink()
    os.mkfifo(template)
    with pytest.raises(FileError, match=r"chat_template\.jinja: not a regular file"):
        open_coder("", tmp_path)


@pytest.mark.parametrize("settings", ["[]", '"text"', "[" * 10**5, "{"], ids=lambda x: x[:9])
def test_settings_that_are_no_object_are_refused(tmp_path, settings):
    train_tokenizer(["a few words, a few more words"] * 9, 300).save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(settings)
    with pytest.raises(FileError, match=r"tokenizer_config\.json"):
        open_coder("", tmp_path)


def test_of_several_templates_the_default_is_taken(tmp_path):
    bytes_tokenizer().save(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    named = [{"name": [], "template": "x"}, {"name": "default", "template": "own"}]
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": named}))
    assert open_coder("", tmp_path).prompt(HELLO) == "own"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": named[:1]}))
    assert open_coder("", tmp_path).template is None


class _Unnamed:
    """A tokenizer of a GGUF file that names no first token."""

    bos_token, bos_token_id, eos_token, eos_token_id = None, None, "</s>", 2
    chat_template = "{{ bos_token }}x{{ eos_token }}"

    def encode(self, text, add_special_tokens=True):
        return [5]


def test_a_gguf_file_names_all_that_ends_an_answer_and_no_text_for_what_it_lacks(monkeypatch):
    monkeypatch.setattr("lezero.serve.coder.gguf_tokenizer", lambda place: _Unnamed())
    monkeypatch.setattr("lezero.serve.coder.gguf_end_tokens", lambda place: frozenset([1, 2, 7]))
    found = open_coder("a.gguf", None)
    assert found.prompt(HELLO) == "x</s>"
    assert (found.end_tokens, found.end_token) == ({1, 2, 7}, 2)
    assert found.first_token == 2
    monkeypatch.setattr(_Unnamed, "bos_token_id", 9)
    assert open_coder("a.gguf", None).first_token == 9


@pytest.mark.parametrize(
    ("named", "first"),
    [
        ({"config": 3}, 3),
        ({"config": 3, "generation_config": 4}, 4),
        ({"config": 3, "generation_config": None}, 3),
        ({"config": None}, 256),
        ({"config": 300}, 256),  # no token of the tokenizer's
        ({"config": "<s>"}, 256),
    ],
)
def test_an_empty_prompt_begins_with_the_token_that_the_model_names(tmp_path, named, first):
    """As generation without input by transformers; a tokenizer may put nothing before a text."""
    tokenizer = bytes_tokenizer()
    tokenizer.save(tmp_path)
    for name, token in named.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"bos_token_id": token}))
    llm = LLM(small(vocab=257), coder=open_coder(tmp_path, tmp_path), weights="bf16")
    assert list(llm.request("", SamplingParams()).prompt) == [first]
    assert list(llm.request("a", SamplingParams()).prompt) == tokenizer.encode("a")
    assert open_coder(tmp_path / "run", tmp_path).first_token == 256
