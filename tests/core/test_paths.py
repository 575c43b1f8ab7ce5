"""`~` in paths: the user's home, another user's, and nobody's."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from lezero.core.errors import FileError
from lezero.core.paths import expand_home, read_regular


def test_a_tilde_is_the_home_of_the_user_or_of_the_one_who_is_named(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    assert expand_home("~") == "/home/ada"
    assert expand_home(Path("~/runs/a")) == "/home/ada/runs/a"
    me = pwd.getpwuid(os.getuid())
    assert expand_home(f"~{me.pw_name}/a") == os.path.join(me.pw_dir, "a")


@pytest.mark.parametrize("text", ["", "a/~/b", "x~", "$HOME/a", "./~x", "/~"])
def test_other_paths_stay_as_they_are(text):
    assert expand_home(text) == text


@pytest.mark.parametrize("text", ["~no-such-user", "~no-such-user/a b/c"])
def test_an_unknown_user_is_named_with_what_to_write_instead(text):
    with pytest.raises(FileError) as error:
        expand_home(text)
    assert str(error.value).startswith(f"{text}: there is no user 'no-such-user' on this machine")
    assert "write the path from the root" in str(error.value)


@pytest.mark.parametrize("given", [None, 5, b"run"])
def test_what_is_no_path_is_refused_as_such(given):
    with pytest.raises(FileError, match=f"got a {type(given).__name__} where a path belongs"):
        expand_home(given)


@pytest.mark.parametrize("path", ["runs/a\0b", Path("a\0")])
def test_a_path_with_nul_is_refused_before_the_system_does(path):
    with pytest.raises(FileError, match=r"a\\x00.*: a path cannot hold the character NUL"):
        expand_home(path)


def test_what_is_read_is_a_regular_file_of_a_bounded_size(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("a")
    assert read_regular(tmp_path / "link", 3) == b"abc"
    with pytest.raises(FileError, match="a: larger than 0 MiB"):
        read_regular(tmp_path / "a", 2)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "nothing", 2)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(FileError, match=f"{path}: not a regular file"):
            read_regular(path, 2)
