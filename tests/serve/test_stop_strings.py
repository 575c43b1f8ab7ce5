from hypothesis import given, settings
from hypothesis import strategies as st

from lezero.serve import StopStrings


def stopped(stops: list[str], parts: list[str]) -> tuple[str, str | None]:
    strings = StopStrings(stops)
    text = ""
    for number in range(len(parts)):
        text += strings.add(parts[number])
        assert "".join(parts[: number + 1]).startswith(text)
    return text + ("" if strings.found else strings.finish()), strings.found


def test_a_stop_string_over_the_borders_of_pieces_is_found() -> None:
    assert stopped(["END"], ["a E", "N", "D b"]) == ("a ", "END")
    assert stopped(["END"], ["a E", "N", "E", "ND"]) == ("a EN", "END")
    assert stopped(["aab"], ["a", "a", "a", "b"]) == ("a", "aab")
    assert stopped(["\n\n"], ["x\n", "y\n", "\nz"]) == ("x\ny", "\n\n")
    assert stopped(["END"], ["a E", "N"]) == ("a EN", None)
    assert stopped([], ["a", "b"]) == ("ab", None)
    assert stopped(["b", "aab", "ab"], ["xa", "ab"]) == ("x", "aab"), "the longest of those"


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    strings = StopStrings(["stop", "topic"])
    assert strings.add("a st") == "a "
    assert strings.add("o") == ""
    assert strings.add("x") == "stox"
    assert strings.add(" sto") == " "
    assert strings.add("p") == ""
    assert strings.found == "stop"
    assert strings.add("more") == ""
    assert strings.finish() == ""


def by_definition(stops: list[str], text: str) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    parts=st.lists(st.text("abc", max_size=4), max_size=8),
)
def test_stopping_is_by_definition_however_the_text_is_cut(
    stops: list[str], parts: list[str]
) -> None:
    assert stopped(stops, parts) == by_definition(stops, "".join(parts))
