"""The environment variables that LeZero reads."""

import pytest

from lezero.core.errors import ConfigError
from lezero.core.flags import flag


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("LEZERO_DEBUG", "", False),
        ("LEZERO_DEBUG", " On ", True),
        ("LEZERO_POOL", "no", False),
        ("LEZERO_LOG", "", "info"),
        ("LEZERO_LOG", "Warning", "warning"),
        ("LEZERO_CACHE", "any where", "any where"),
        ("TORCHELASTIC_RESTART_COUNT", "", 0),
        ("TORCHELASTIC_RESTART_COUNT", " 02 ", 2),
    ],
)
def test_what_is_set_is_read(monkeypatch, name, given, value):
    monkeypatch.setenv(name, given)
    assert flag(name) == value


@pytest.mark.parametrize(
    ("name", "given", "allowed"),
    [
        ("LEZERO_DEBUG", "2", "1 or 0"),
        ("LEZERO_LOG", "loud", "debug, info, warning, error"),
        ("TORCHELASTIC_RESTART_COUNT", "x", "a whole number of at least 0"),
        ("TORCHELASTIC_RESTART_COUNT", "-1", "a whole number of at least 0"),
        ("TORCHELASTIC_RESTART_COUNT", "1_0", "a whole number of at least 0"),
    ],
)
def test_a_value_that_is_not_allowed_is_named(monkeypatch, name, given, allowed):
    monkeypatch.setenv(name, given)
    with pytest.raises(ConfigError, match=rf"^{name}='{given}': allowed is {allowed} \("):
        flag(name)
