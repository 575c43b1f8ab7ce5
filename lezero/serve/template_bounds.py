"""Jinja's sandbox with the bounds of `template_budget`; imported where a template is rendered."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinMethodType
from typing import Any

from jinja2 import nodes, pass_context, pass_environment, pass_eval_context
from jinja2.filters import make_attrgetter
from jinja2.runtime import LoopContext, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from lezero.serve.template_budget import MOST, budget

_SHALLOW = {"length", "count", "list", "first", "last", "items", "map", "default", "d", "attr"}
_SHALLOW |= {"select", "reject", "selectattr", "rejectattr", "reverse", "batch", "slice"}
"""Filters and tests that do not read what is in the items of a list."""
_SHALLOW |= {"defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "sameas"}
_WIDE = {"batch", "center", "indent", "slice", "truncate", "wordwrap"}
"""Filters that take widths and counts; other integers may be any, such as times."""
_SLOW = {"striptags", "urlize", "wordwrap", "xmlattr", "urlencode", "pprint", "title"}
_SLOW_MOST, _INDENT, _PLACES = 1 << 17, 100, 400


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Renders within the budget of `one_rendering`, in which it also compiles."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_written, **options)
        del self.globals["lipsum"]

    def close_bounds(self) -> None:
        """Puts bounds to the filters and tests, once all are there."""
        self.filters["sum"] = _sum
        for table in (self.filters, self.tests):
            for name, work in list(table.items()):
                table[name] = _bounded(name, work)
        own = {"counted": _counted, "joined": _joined, "walked": _walked, "made": _made}
        self.filters |= {f"lezero {name}": work for name, work in own.items()}

    def compiled(self, template: str) -> Any:
        tree = _Bounds().visit(self.parse(template))
        return self.from_string(tree.set_environment(self))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str:  # the usual one
            budget().step(len(left) + len(right))
            return left + right
        budget().turn()
        _need_of_operator(operator, left, right)
        return budget().made(super().call_binop(context, operator, left, right))

    def call(self, context: Any, called: Any, /, *args: Any, **named: Any) -> Any:
        now = budget()
        now.turn()
        if isinstance(called, LoopContext) and args:
            args = (now.counted(args[0]), *args[1:])
        own = called.__self__ if isinstance(called, BuiltinMethodType) else None
        if isinstance(own, (str, bytes, int, float)):
            for value in (*args, *named.values()):
                now.width(value)
        if isinstance(own, (str, bytes)):
            args = _need_of_method(called.__name__, own, args, named)
        return now.made(super().call(context, called, *args, **named))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        found = super().wrap_str_format(value)
        if found is None:
            return None

        def within(*args: Any, **named: Any) -> str:
            given = args[0] if value.__name__ == "format_map" and args else (args, named)
            _need_of_format(value.__self__, "{", given)
            return found(*args, **named)

        return functools.update_wrapper(within, value)


class _Bounds(NodeTransformer):
    """Puts what counts around the parts of a template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _through("counted", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through("joined", nodes.Tuple(node.nodes, "load", lineno=node.lineno))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        sides: list[Any] = [node, *node.ops]
        for side in sides:
            if not isinstance(side.expr, nodes.Const):
                side.expr = _through("walked", side.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _through("made", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = _through("made", node.filter, node.lineno)
        return node


def _through(name: str, inner: Any, line: int = 0) -> nodes.Filter:
    at = line or inner.lineno
    return nodes.Filter(inner, f"lezero {name}", [], [], None, None, lineno=at)


def _counted(items: Any) -> Iterator[Any]:
    return budget().counted(items)


@pass_eval_context
def _joined(context: Any, parts: tuple[Any, ...]) -> str:
    now = budget()
    now.turn()
    now.need(sum(map(now.walked, parts)))
    return str(markup_join(parts)) if context.autoescape else str_join(parts)


def _walked(value: Any) -> Any:
    now = budget()
    now.turn()
    now.walked(value)
    return value


def _made(value: Any) -> Any:
    now = budget()
    now.turn()
    return now.made(value)


@pass_context
def _written(_: Any, value: Any) -> Any:
    """What `{{ … }}` writes; of the context, so that nothing is written before it renders."""
    now = budget()
    now.step(len(value) if type(value) is str else now.walked(value))
    return value


@pass_environment
def _sum(environment: Any, items: Any, attribute: Any = None, start: Any = 0) -> Any:
    taken = items if attribute is None else map(make_attrgetter(environment, attribute), items)
    for item in budget().counted(taken):
        start = environment.call_binop(None, "+", start, item)
    return start


def _bounded(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test that counts, and says what it will make."""
    passes = hasattr(work, "jinja_pass_arg")

    @functools.wraps(work)
    def within(*args: Any, **named: Any) -> Any:
        now = budget()
        now.turn()
        context, given = (args[:1], list(args[1:])) if passes else ((), list(args))
        for i, value in enumerate(given):
            given[i] = now.counted(value) if isinstance(value, Iterator) else value
        if name in _WIDE:
            for value in (*given[1:], *named.values()):
                now.width(value)
        if name not in _SHALLOW:
            size = sum(map(now.walked, (*given, *named.values())))
            if name in _SLOW and size > _SLOW_MOST:
                now.need(MOST + 1)
        if name in _NEEDS and given:
            _NEEDS[name](given, named)
        return now.made(work(*context, *given, **named))

    return within


def _need_of_operator(operator: str, left: Any, right: Any) -> None:
    now, sized = budget(), (str, bytes, list, tuple)
    if operator == "+" and isinstance(left, sized) and isinstance(right, sized):
        now.need(len(left) + len(right))
    elif operator == "%" and isinstance(left, (str, bytes)):
        _need_of_format(left, "%", right)
    elif operator == "*":
        for many, count in ((left, right), (right, left)):
            if isinstance(many, sized) and isinstance(count, int):
                now.need(max(0, len(many) * count))
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        now.width(max(0, right) * left.bit_length() * 1024)


def _need_of_format(form: Any, mark: str, given: Any) -> None:
    """What a text makes in which marks stand for values, each maybe written often and wide."""
    now = budget()
    text = form if isinstance(form, str) else form.decode("latin-1")
    times = text.count(mark)
    widths = sum(int(x[:9]) for x in re.findall(r"\d+", text))
    if re.search(r"%[^a-zA-Z]*\*" if mark == "%" else r":[^{}]*\{", text):
        widths += times * MOST  # as wide as a value says
    now.need(len(text) + widths)
    now.need(len(text) + times * now.walked(given) if times > 1 else now.walked(given))


def _need_of_method(
    name: str, text: Any, args: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[Any, ...]:
    """The arguments of a method of a text, which would make so much."""
    now = budget()
    now.need(len(text))
    if name == "replace" and len(args) > 1:
        _need_of_replace([text, *args], named)
    elif name == "join" and args:
        args = (list(now.counted(args[0])),)
        now.need(now.walked(args[0]) + len(text) * len(args[0]))
    elif name == "translate" and args and isinstance(args[0], dict):
        now.need(len(text) * max([1, *map(now.walked, args[0].values())]))
    elif name == "expandtabs":
        tabs = text.count("\t" if isinstance(text, str) else b"\t")
        now.need(tabs * max(8, *(x for x in (*args, *named.values()) if isinstance(x, int)), 0))
    return args


def _need_of_replace(given: list[Any], named: Mapping[str, Any]) -> None:
    old, new = [*given[1:], *named.values(), "", ""][:2]
    if type(old) is type(given[0]) and isinstance(old, (str, bytes)):
        budget().need(given[0].count(old) * budget().walked(new))
    else:
        budget().need(budget().walked(given[0]) * budget().walked(new))


def _need_of_join(given: list[Any], named: Mapping[str, Any]) -> None:
    now = budget()
    if isinstance(given[0], Iterator):
        given[0] = list(given[0])
    between = now.walked([*given[1:2], *named.values()])
    count = len(given[0]) if hasattr(given[0], "__len__") else 0
    now.need(now.walked(given[0]) + count * between if count > 1 else now.walked(given[0]))


def _need_of_indent(given: list[Any], named: Mapping[str, Any]) -> None:
    lines = str(given[0]).count("\n") + 1
    widths = [x if isinstance(x, int) else len(x) for x in (*given[1:2], *named.values())
              if isinstance(x, (int, str))]  # fmt: skip
    budget().need(lines * max([4, *widths]))


def _need_of_json(given: list[Any], named: Mapping[str, Any]) -> None:
    for value in (*given[1:], *named.values()):
        parts = value if isinstance(value, (list, tuple)) else [value]
        size = [x if isinstance(x, int) else len(x) for x in parts if isinstance(x, (int, str))]
        budget().need(MOST + 1 if any(x > _INDENT for x in size) else 0)


def _need_of_round(given: list[Any], named: Mapping[str, Any]) -> None:
    for value in (*given[1:], *named.values()):
        if isinstance(value, int) and abs(value) > _PLACES:
            budget().need(MOST + 1)


_NEEDS: dict[str, Callable[[list[Any], Mapping[str, Any]], None]] = {
    "replace": _need_of_replace,
    "join": _need_of_join,
    "indent": _need_of_indent,
    "tojson": _need_of_json,
    "round": _need_of_round,
    "format": lambda given, named: _need_of_format(str(given[0]), "%", [given[1:], named]),
}
