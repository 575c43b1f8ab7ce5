"""Files to documents: what is used, what is named and counted, what is refused."""

from __future__ import annotations

import gzip
import json
import logging
import os

import pytest

from lezero.core.errors import ConfigError, FileError
from lezero.data.build import prepare
from lezero.data.config import DataConfig
from lezero.data.reading import Findings, find_files, left_out_lines, nothing_usable, read


def documents(folder, **settings):
    config = DataConfig(train=[str(folder)], **settings)
    findings = Findings()
    return list(read(find_files(config.train, "data.train"), config, findings)), findings


def jsonl(path, *lines):
    path.write_bytes(
        b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines)
    )


def test_text_and_jsonl_of_a_folder_in_order(tmp_path):
    (tmp_path / "b.txt").write_text("second", encoding="utf-8")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.md").write_bytes(b"\xef\xbb\xbffirst")  # a byte order mark is no text
    (tmp_path / "ignored.png").write_bytes(b"\x89PNG")
    (tmp_path / ".hidden.txt").write_text("no")
    jsonl(tmp_path / "c.jsonl", {"text": "third"}, {"prompt": "p", "response": "r", "id": 1}, b"")
    found, findings = documents(tmp_path)
    assert [(d.prompt, d.text) for d in found] == [
        (None, "first"),
        (None, "second"),
        (None, "third"),
        ("p", "r"),
    ]
    assert findings.documents == 4
    assert findings.files == 3
    assert not findings.reasons


def test_field_names_and_formats_are_configurable(tmp_path):
    jsonl(tmp_path / "data.txt", {"body": "text"}, {"q": "ask", "a": "answer"})
    found, _ = documents(
        tmp_path, format="jsonl", text_field="body", prompt_field="q", response_field="a"
    )
    assert [(d.prompt, d.text) for d in found] == [(None, "text"), ("ask", "answer")]


BOTH = {"text": "Q: ask A: answer", "prompt": "ask", "response": "answer"}


def test_of_a_text_and_a_pair_in_one_line_the_fields_that_were_named_are_taken(tmp_path):
    jsonl(tmp_path / "a.jsonl", {**BOTH, "output": "answer"}, {"text": "more"})
    pairs, findings = documents(tmp_path, response_field="output")
    assert [(d.prompt, d.text) for d in pairs] == [("ask", "answer"), (None, "more")]
    assert findings.both is None
    pairs, findings = documents(tmp_path, text_field="none", on_bad_file="skip")
    assert [(d.prompt, d.text) for d in pairs] == [("ask", "answer")]
    assert findings.both is None
    jsonl(tmp_path / "a.jsonl", BOTH, {**BOTH, "text": "more"})
    texts, findings = documents(tmp_path)
    assert [(d.prompt, d.text) for d in texts] == [(None, BOTH["text"]), (None, "more")]
    assert findings.both.count == 2
    where = f"{tmp_path / 'a.jsonl'}, line 1"
    said = f"{where}: has 'text', which is taken, beside 'prompt' and 'response'"
    assert findings.both.first == said


@pytest.mark.parametrize("held", [False, True])
def test_a_text_beside_a_pair_is_told_once(tmp_path, held, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("lezero"), "propagate", True)
    jsonl(tmp_path / "a.jsonl", *({**BOTH, "text": word * 9} for word in ("one ", "two ")))
    jsonl(tmp_path / "held.jsonl", {**BOTH, "text": "three " * 9})
    validation = [str(tmp_path / "held.jsonl")] if held else 0.1
    config = DataConfig(train=[str(tmp_path / "a.jsonl")], validation=validation, sequence=8)
    prepare(config, tmp_path / "cache")
    (said,) = [x for x in caplog.messages if "which is taken, beside" in x]
    assert f"(such lines: {3 if held else 2}); to learn from such pairs" in said


def test_null_is_a_field_that_is_not_there(tmp_path):
    """As tables are written that have texts and pairs."""
    jsonl(
        tmp_path / "a.jsonl",
        {"text": "one", "prompt": None, "response": None},
        {**BOTH, "text": None},
        dict.fromkeys(BOTH),
    )
    found, findings = documents(tmp_path)
    assert [(d.prompt, d.text) for d in found] == [(None, "one"), ("ask", "answer")]
    assert findings.reasons == {"missing field": 1}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"content": "x"}, "'content': name yours as data.text_field, or as data.prompt_field and"),
        ({"prompt": "x", "answer": "y"}, "'prompt', 'answer': name yours as data.text_field"),
        (dict.fromkeys("abcdef", 1), "'a', 'b', 'c', 'd' and 2 more: name yours"),
        ({"x" * 99: 1, "\n": 1, "no": None}, f"'{'x' * 37}...', '\\n': name yours"),
    ],
)
def test_a_line_with_other_fields_says_which_and_how_to_name_them(tmp_path, line, said):
    jsonl(tmp_path / "data.jsonl", line)
    with pytest.raises(FileError) as told:
        documents(tmp_path, on_bad_file="refuse")
    assert f"has neither 'text' nor 'prompt' and 'response', but {said}" in str(told.value)
    jsonl(tmp_path / "data.jsonl", {"text": None})
    with pytest.raises(FileError, match=r"'prompt' and 'response'\. Repair or remove it"):
        documents(tmp_path, on_bad_file="refuse")


BAD_LINES = {
    "bad JSON": b"{not json",
    "no JSON object": b"[1]",
    "missing field": b'{"other": "x"}',
    "field is not text": b'{"text": 3}',
    "empty text": b'{"text": "  "}',
    "not UTF-8": b'{"text": "\xff"}',
    "broken Unicode": b'{"text": "\\ud800"}',
    "line too long": b'{"text": "' + b"x" * 3000 + b'"}',
}


@pytest.mark.parametrize("reason", BAD_LINES)
def test_bad_lines_are_named_counted_and_skipped_or_refused(tmp_path, reason):
    path = tmp_path / "data.jsonl"
    jsonl(path, {"text": "good"}, BAD_LINES[reason], {"text": "also good"})
    found, findings = documents(tmp_path, max_line_bytes=2000)
    assert [d.text for d in found] == ["good", "also good"]
    assert findings.reasons == {reason: 1}
    assert f"{path}, line 2" in findings.places[reason][str(path)].first
    with pytest.raises(FileError, match="line 2"):
        documents(tmp_path, max_line_bytes=2000, on_bad_file="refuse")


BAD_FILES = {
    "empty file": b" \n",
    "not UTF-8": "text".encode("utf-16"),
    "file too large": b"x" * 2000,
}


@pytest.mark.parametrize("reason", BAD_FILES)
def test_bad_files_are_named_counted_and_skipped_or_refused(tmp_path, reason):
    (tmp_path / "bad.txt").write_bytes(BAD_FILES[reason])
    (tmp_path / "good.txt").write_text("good")
    found, findings = documents(tmp_path, max_file_bytes=1000)
    assert [d.text for d in found] == ["good"]
    assert findings.reasons == {reason: 1}
    assert "bad.txt" in left_out_lines(findings.to_json())[0]
    with pytest.raises(FileError, match=r"bad\.txt"):
        documents(tmp_path, max_file_bytes=1000, on_bad_file="refuse")


PACKED = {
    "data.parquet": (b"PAR1\x15\x04\x00\xffPAR1", "a Parquet file; write its texts as .jsonl"),
    "data.jsonl.gz": (gzip.compress(b'{"text": "x"}'), "packed by gzip; unpack it"),
    "data.jsonl": (b"PK\x03\x04\x14\x00", "a zip archive, as .docx and .xlsx are; unpack it, or"),
    "data.json": (b"\x28\xb5\x2f\xfd\x04", "packed by zstd; unpack it"),
}


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("limit", [5, 1000])
def test_a_binary_file_is_told_by_what_it_is(tmp_path, name, limit):
    path, (held, said) = tmp_path / name, PACKED[name]
    path.write_bytes(held)
    for form in ("auto", "text", "jsonl"):
        config = DataConfig(train=(str(path),), format=form, max_file_bytes=limit)
        findings = Findings()
        assert not list(read([str(path)], config, findings))
        assert findings.reasons == {"no text": 1}
        assert f"{path}: is {said}" in str(nothing_usable("data.train", findings))


@pytest.mark.parametrize("text", ["PAR1", "PAR1 to PAR4", "P", "PK"])
def test_a_text_may_begin_as_binary_files_do(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    found, findings = documents(tmp_path)
    assert [d.text for d in found] == [text]
    assert not findings.reasons


def test_unreadable_files_and_empty_jsonl(tmp_path):
    (tmp_path / "broken.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "empty.jsonl").write_bytes(b"")
    found, findings = documents(tmp_path)
    assert found == []
    assert findings.reasons == {"unreadable file": 1, "empty file": 1}
    assert "broken.txt: cannot be read" in left_out_lines(findings.to_json())[0]


@pytest.mark.parametrize("held", [b"", b"\n", b"\n \r\n\t\n"])
def test_jsonl_of_blank_lines_is_an_empty_file(tmp_path, held):
    (tmp_path / "blank.jsonl").write_bytes(held)
    jsonl(tmp_path / "good.jsonl", b"", {"text": "good"}, b"")
    found, findings = documents(tmp_path)
    assert [d.text for d in found] == ["good"]
    assert findings.reasons == {"empty file": 1}
    assert "blank.jsonl: empty file" in left_out_lines(findings.to_json())[0]
    assert "blank.jsonl: empty file" in str(nothing_usable("data.train", findings))
    with pytest.raises(FileError, match=r"blank\.jsonl: empty file"):
        documents(tmp_path, on_bad_file="refuse")


def test_every_bad_file_is_named_and_its_lines_are_counted(tmp_path):
    jsonl(tmp_path / "a.jsonl", *[BAD_LINES["bad JSON"]] * 5, {"text": "good"})
    (tmp_path / "b.txt").write_bytes(b"")
    (tmp_path / "c.txt").write_bytes("café".encode("latin-1"))
    for number in range(25):
        (tmp_path / f"x{number}.txt").write_bytes(b"\xff\xfe")
    _, findings = documents(tmp_path)
    lines = left_out_lines(findings.to_json())
    assert "a.jsonl, line 1: bad JSON" in lines[0]
    assert lines[0].endswith("(the first of 5)")
    assert "b.txt: empty file" in lines[1]
    assert "c.txt: no UTF-8 text" in lines[2]
    assert lines[2].endswith("; and 6 more files")
    assert len(findings.to_json()["left_out_of"]["not UTF-8"]) == 26


def test_names_that_stand_for_nothing_are_errors(tmp_path):
    for name, text in (
        (str(tmp_path), "holds no file that ends in"),
        (str(tmp_path / "*.txt"), "no file matches"),
        (str(tmp_path / "missing.txt"), "no such file or folder"),
    ):
        with pytest.raises(FileError, match=text):
            find_files([name], "data.train")


def test_a_file_named_twice_is_read_once(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x")
    assert find_files([str(path), str(tmp_path), str(tmp_path / "*.txt")], "t") == [str(path)]


def test_config_explains_itself():
    with pytest.raises(ConfigError, match="did you mean 'sequence'"):
        DataConfig(train="x", sequnce=4)
    with pytest.raises(ConfigError, match="at least 0 and below 1"):
        DataConfig(train="x", validation=1.0)
    with pytest.raises(ConfigError, match="allowed is bytes"):
        DataConfig(train="x", tokenizer="bpe")
    with pytest.raises(ConfigError, match="not both"):
        DataConfig(train="x", tokenizer={"train": 300, "folder": "y"})
    with pytest.raises(ConfigError, match="train"):
        DataConfig(train=[])
    for tokenizer in ("bytes", {"train": 300}, {"folder": "y"}):
        config = DataConfig(train="x", validation=["v"], tokenizer=tokenizer)
        assert DataConfig.parse(config.to_dict()) == config


def test_what_a_run_writes_into_its_folder_is_no_text(tmp_path):
    run = tmp_path / "first"
    for name in ("text.txt", "first/notes.md", "first/metrics.jsonl", "first/tokenizer/merges.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    texts = [str(tmp_path / "first/notes.md"), str(tmp_path / "text.txt")]
    assert len(find_files([str(tmp_path)], "data.train")) == 4, "a folder of the user's own"
    for name in ("config.yaml", "data.json"):
        (run / name).touch()
    assert find_files([str(tmp_path)], "data.train") == texts
    assert find_files([str(run)], "data.train") == texts[:1]


def test_linked_folders_give_their_files_once(tmp_path):
    texts = tmp_path / "texts"
    for name in ("texts/b/x.txt", "other/y.txt", "other/.hidden/z.txt", "texts/.out/no.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    links = {"texts/a": "texts/b", "texts/link": "other", "texts/same": "other"}
    loops = {"texts/loop": "texts", "texts/b/up": "texts/b", "other/back": "texts"}
    for link, target in {**links, **loops}.items():
        (tmp_path / link).symlink_to(tmp_path / target)
    found = find_files([str(texts)], "data.train")
    assert found == [str(texts / "b/x.txt"), str(texts / "link/y.txt")]


def test_a_folder_that_cannot_be_listed_is_told(tmp_path, monkeypatch):
    (tmp_path / "good.txt").write_text("good")
    barred = tmp_path / "barred"
    barred.mkdir()
    scandir = os.scandir

    def denied(path):
        if str(path) == str(barred):  # nobody is denied a thing who tests as root
            raise PermissionError(13, "Permission denied", str(barred))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    found, findings = documents(tmp_path)
    assert [d.text for d in found] == ["good"]
    assert left_out_lines(findings.to_json()) == [
        f"1 x no file: {barred}: is no file but a folder that cannot be listed"
    ]


def test_a_pipe_is_told_instead_of_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "good.txt").write_text("good")
    found, findings = documents(tmp_path)
    assert [d.text for d in found] == ["good"]
    assert findings.reasons == {"no file": 1}
    with pytest.raises(FileError, match=r"pipe\.txt: is no file but a pipe, device or socket"):
        documents(tmp_path, on_bad_file="refuse")


def test_a_json_file_is_trained_on_only_as_the_config_says(tmp_path):
    path = tmp_path / "array.json"
    path.write_text('[{"text": "one"}]')
    found, findings = documents(path)
    assert (found, findings.reasons) == ([], {"JSON file": 1})
    assert "write one object a line and name it .jsonl" in str(nothing_usable("x", findings))
    with pytest.raises(FileError, match=r"array\.json: JSON is not trained on as text"):
        documents(path, on_bad_file="refuse")
    assert documents(path, format="text")[0][0].text == path.read_text()
    path.write_text('{"text": "one"}')
    assert documents(path, format="jsonl")[0][0].text == "one"
