"""API keys, rates, and addresses that others reach."""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

import pytest

from lezero.core.errors import ConfigError, FileError
from lezero.serve.server.config import ServeConfig
from lezero.serve.server.keys import Keys, RateLimit, new_key, read_keys
from lezero.serve.server.run import Server
from tests.serve.server.running import serving, small_llm


def test_a_key_is_kept_as_a_hash_and_found_again() -> None:
    key, line = new_key("alice")
    other, _ = new_key("bob")
    assert key.removeprefix("lz-") not in line
    assert len(key) > 43
    keys = Keys(["# a comment", "", line])
    assert keys.owner(f"Bearer {key}") == "alice"
    assert keys.owner(f"bearer {key}") == "alice"
    for wrong in ("", key, f"Basic {key}", f"Bearer {other}", f"Bearer {key}x", "Bearer \udcff"):
        assert keys.owner(wrong) is None


def test_a_check_compares_the_hashes_of_all_keys_in_constant_time(monkeypatch) -> None:
    made = [new_key(name) for name in ("alice", "bob", "carol")]
    keys = Keys([line for _, line in made])
    real, compared = hmac.compare_digest, list[tuple[str, str]]()
    monkeypatch.setattr(hmac, "compare_digest", lambda *both: compared.append(both) or real(*both))
    owners = {key: line.split()[0] for key, line in made}
    for key in (*owners, "lz-of-nobody"):
        compared.clear()
        assert keys.owner(f"Bearer {key}") == owners.get(key)
        given = hashlib.sha256(key.encode()).hexdigest()
        assert compared == [(given, line.split("sha256:")[1]) for _, line in made]


def test_files_and_the_environment(tmp_path: Path, monkeypatch) -> None:
    (key, line), (other, other_line) = new_key("a"), new_key("b")
    path = tmp_path / "keys"
    path.write_text(f"{line}\n", encoding="utf-8-sig")  # as some editors save it
    monkeypatch.setenv("LEZERO_API_KEYS", f"{other_line},")
    keys = read_keys(str(path))
    assert keys.owner(f"Bearer {key}") == "a"
    assert keys.owner(f"Bearer {other}") == "b"
    path.write_text(key)
    with pytest.raises(ConfigError, match="line 1") as found:
        read_keys(str(path))
    assert key not in str(found.value)
    path.write_text("# nobody\n")
    with pytest.raises(ConfigError, match="holds no keys"):
        read_keys(str(path))
    path.write_text("#" * (1 << 20) + f"\n{line}\n")
    with pytest.raises(ConfigError, match="longer than 1048576 bytes"):
        read_keys(str(path))
    with pytest.raises(FileError, match="cannot be read"):
        read_keys(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="name"):
        new_key("a b")


def test_keys_from_a_pipe_are_refused_before_they_are_read() -> None:
    reading, writing = os.pipe()
    os.write(writing, new_key("one")[1].encode())
    os.close(writing)
    with pytest.raises(ConfigError, match=r"no regular file.*LEZERO_API_KEYS"):
        read_keys(f"/dev/fd/{reading}")
    os.close(reading)


def test_a_named_pipe_of_keys_that_nobody_writes_to_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "keys")
    with pytest.raises(ConfigError, match="no regular file"):
        read_keys(str(tmp_path / "keys"))


def test_a_key_does_not_learn_what_others_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    (alice, one), (bob, two) = new_key("alice"), new_key("bob")
    again, three = new_key("alice")
    monkeypatch.setenv("LEZERO_API_KEYS", ",".join([one, two, three]))
    asked = {"prompt": "a secret of more than sixteen letters, and its end", "max_tokens": 1}
    with serving(small_llm()) as client:

        def cached(key: str) -> int:
            found = client.ask("/v1/completions", asked, authorization=f"Bearer {key}")
            return int(found.json["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert [cached(key) for key in (alice, bob, again, bob)] == [0, 0, 48, 48]


def test_a_rate_is_a_bucket_for_each_client() -> None:
    now = 0.0
    limit = RateLimit(60, clock=lambda: now)
    assert [limit.wait_s("a") for _ in range(60)] == [0] * 60
    assert limit.wait_s("a") == pytest.approx(1)
    assert limit.wait_s("b") == 0
    now = 1.01
    assert limit.wait_s("a") == 0
    assert limit.wait_s("a") > 0
    for number in range(20_000):
        limit.wait_s(str(number))
    assert len(limit._buckets) <= 10_000


def test_unused_times_add_up_to_a_minutes_worth() -> None:
    now = 0.0
    limit = RateLimit(60, clock=lambda: now)
    assert limit.wait_s("a") == 0
    now = 3600.0
    assert [limit.wait_s("a") for _ in range(90)].count(0) == 60


def test_a_public_address_needs_keys_or_the_word() -> None:
    llm = small_llm()
    for host in ("0.0.0.0", "::"):
        with pytest.raises(ConfigError, match="--public-without-keys"):
            Server(llm, ServeConfig(host=host, port=0))
    for host in ("127.0.0.1", "localhost", "::1"):
        assert ServeConfig(host=host).loopback
    Server(llm, ServeConfig(host="0.0.0.0", port=0, public_without_keys=True))._socket.close()
    for host in ("no such host", "a..b", "a" * 70, "192.0.2.1"):
        with pytest.raises(ConfigError, match=r"^host: got .* no address"):
            Server(llm, ServeConfig(host=host, port=0, public_without_keys=True))


def test_a_port_that_is_taken() -> None:
    with serving(small_llm()) as client, pytest.raises(ConfigError, match="port 0"):
        Server(small_llm(), ServeConfig(port=client.port))


def test_only_those_with_a_key_are_answered(tmp_path: Path) -> None:
    key, line = new_key("alice")
    (tmp_path / "keys").write_text(line)
    with serving(small_llm(), keys=str(tmp_path / "keys")) as client:
        for path in ("/v1/models", "/metrics", "/stats"):
            found = client.ask(path)
            assert found.status == 401
            assert found.error["code"] == "invalid_api_key"
            assert client.ask(path, authorization=f"Bearer {key}").status == 200
        for path in ("/", "/health", "/ready"):
            assert client.ask(path).status == 200
        for name in ("other", client.server.name):
            for body in (None, {}):
                found = client.ask(f"/v1/models/{name}", body)
                assert found.error["code"] == "invalid_api_key"
        other = client.ask("/v1/models/other", authorization=f"Bearer {key}")
        assert (other.status, other.error["code"]) == (404, "model_not_found")
        body = {"prompt": "x", "max_tokens": 1}
        unknown = client.ask("/v1/completions", body)
        assert unknown.status == 401
        assert b"'Authorization: Bearer KEY'" in unknown.body
        assert client.ask("/v1/completions", body, authorization="Bearer lz-x").status == 401
        assert client.ask("/v1/completions", body, authorization=f"Bearer {key}").status == 200


def test_keys_of_one_name_share_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    (old, one), (new, two), (other, three) = new_key("alice"), new_key("alice"), new_key("bob")
    monkeypatch.setenv("LEZERO_API_KEYS", ",".join([one, two, three]))
    with serving(small_llm(), rate=1) as client:
        asked = {"prompt": "x", "max_tokens": 1}
        found = [
            client.ask("/v1/completions", asked, authorization=f"Bearer {key}").status
            for key in (old, new, other)
        ]
    assert found == [200, 429, 200]


def test_a_rate_over_http() -> None:
    with serving(small_llm(), rate=6) as client:
        for _ in range(6):
            assert client.complete("x", max_tokens=1).status == 200
        found = client.complete("x", max_tokens=1)
        assert found.status == 429
        assert found.error["type"] == "rate_limit_error"
        assert 9 <= int(found.headers["retry-after"]) <= 11
        assert client.ask("/health").status == 200


def test_a_key_of_two_names_is_refused() -> None:
    key, line = new_key("ann")
    assert Keys([line, line]).owner(f"Bearer {key}") == "ann"
    with pytest.raises(ConfigError, match="line 3 gives the key of 'ann' to 'bob' too") as told:
        Keys([line, "", line.replace("ann", "bob")], "file")
    assert key not in str(told.value)


def test_a_key_has_one_name_in_all_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, line = new_key("ann")
    (tmp_path / "keys").write_text(f"{line}\n")
    monkeypatch.setenv("LEZERO_API_KEYS", line)
    assert read_keys(str(tmp_path / "keys")).owner(f"Bearer {key}") == "ann"
    monkeypatch.setenv("LEZERO_API_KEYS", line.replace("ann", "bob"))
    with pytest.raises(ConfigError, match="keys gives the key of 'bob' to 'ann' too"):
        read_keys(str(tmp_path / "keys"))
