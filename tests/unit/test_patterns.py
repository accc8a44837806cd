"""No regular expression of the source takes more than linear time, whatever text it meets."""

from __future__ import annotations

import ast
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

import txbox

_ROOT = Path(txbox.__file__).parent
_METHODS = ("search", "match", "fullmatch", "sub", "subn", "split", "findall", "finditer")
_LONG, _PAIRED = 200_000, 10_000
# far above what a linear pattern takes for _PAIRED characters, far below a quadratic one
_LIMIT_S = 0.08


class Pattern(NamedTuple):
    """A pattern of the source, and the methods that it is used with."""

    where: str
    text: str
    flags: int
    methods: frozenset[str]


def _flags(node: ast.expr) -> int:
    """`re.IGNORECASE | re.DOTALL`."""
    return sum(getattr(re, part.attr) for part in ast.walk(node) if isinstance(part, ast.Attribute))


class File(NamedTuple):
    """A module of the source, walked once: that takes longer than all else that is done at collection."""

    path: Path
    tree: ast.Module
    calls: list[ast.Call]
    names: dict[int, str]
    methods: dict[str, set[str]]


def _walked(path: Path) -> File:
    """The calls of a module; the names of what it assigns; the methods that are named of a name."""
    file = File(path, ast.parse(path.read_text()), [], {}, {})
    for node in ast.walk(file.tree):
        match node:
            case ast.Assign(targets=targets, value=value):
                file.names.update(
                    {id(value): name.id for name in targets if isinstance(name, ast.Name)}
                )
            case ast.Attribute(value=ast.Name(id=name), attr=method) if method in _METHODS:
                file.methods.setdefault(name, set()).add(method)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="re"))):
                file.calls.append(node)
    return file


def _patterns() -> Iterator[Pattern]:
    files = [_walked(path) for path in sorted(_ROOT.rglob("*.py"))]
    for file in files:
        for node in file.calls:
            match node:
                case ast.Call(func=ast.Attribute(attr=method), args=[pattern, *rest]) if method in (
                    "compile",
                    *_METHODS,
                ):
                    pass
                case _:
                    continue
            if isinstance(pattern, ast.Name):
                # a user's: Redaction.errors, which are bounded instead
                assert (file.path.name, method) == ("policy.py", "compile"), (
                    f"{file.path}: not a literal"
                )
                continue
            methods, flags = {method}, 0
            if method == "compile":
                flags = _flags(rest[0]) if rest else 0
                name = file.names.get(id(node), "")
                # of a compiled pattern those that are named anywhere; these two if none is
                users = [file] if name.startswith("_") else files
                methods = set[str]().union(*(user.methods.get(name, ()) for user in users))
            where = f"{file.path.relative_to(_ROOT)}:{node.lineno}"
            yield Pattern(
                where, _text(pattern, file.tree), flags, frozenset(methods or {"search", "fullmatch"})
            )  # fmt: skip


def _text(pattern: ast.expr, tree: ast.Module) -> str:
    """A literal, or a sum of literals and of constants of the same module."""
    if isinstance(pattern, ast.BinOp):
        return _text(pattern.left, tree) + _text(pattern.right, tree)
    if isinstance(pattern, ast.Name):
        (value,) = (
            node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == pattern.id
        )
        return _text(value, tree)
    text: str = ast.literal_eval(pattern)
    return text


_ALL = list(_patterns())


def _units(pattern: Pattern) -> list[str]:
    """A text for each literal and class of a pattern, for each run of literals, and one that fits nowhere."""
    units = dict.fromkeys(_inside(re._parser.parse(pattern.text, pattern.flags)))  # type: ignore[attr-defined]
    return [*units, "\x00"]


def _inside(tree: Any) -> Iterator[str]:
    run = ""
    for op, value in tree:
        name = str(op)
        if name == "LITERAL":
            run += chr(value)
            continue
        if run:
            yield run
            run = ""
        if name == "NOT_LITERAL":
            yield "x" if value != ord("x") else "y"
        elif name == "ANY":
            yield "x"
        elif name == "IN":
            yield from _of_class(value)
        else:
            for part in _parts(value):
                yield from _inside(part)
    if run:
        yield run


def _parts(value: Any) -> Iterator[Any]:
    """The patterns inside of a group, a repeat, a branch or a look-around."""
    if isinstance(value, re._parser.SubPattern):  # type: ignore[attr-defined]
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _parts(part)


def _of_class(members: Any) -> Iterator[str]:
    """One character of each member; of a negated class one that is in none of them."""
    text = "".join(
        chr(value)
        if str(op) == "LITERAL"
        else chr(value[0])
        if str(op) == "RANGE"
        else {"CATEGORY_DIGIT": "1", "CATEGORY_SPACE": " ", "CATEGORY_WORD": "w"}.get(str(value), "")
        for op, value in members
    )  # fmt: skip
    if str(members[0][0]) != "NEGATE":
        yield from text[:4]
        return
    yield from (char for char in "x 1\n" if re.fullmatch(f"[^{re.escape(text)}]", char))


@contextmanager
def _limit(limit_s: float, what: str) -> Iterator[None]:
    def ended(_number: int, _frame: FrameType | None) -> None:
        raise AssertionError(what)

    before = signal.signal(signal.SIGVTALRM, ended)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _texts(pattern: Pattern) -> Iterator[str]:
    units = _units(pattern)
    for one, other in product(units, repeat=2):
        run = other * (_PAIRED // len(other))
        if one <= other:
            yield (one + other) * (_PAIRED // len(one + other))
        yield f"{one}{run}\x00"
        yield f"{run}{one}"
    for one in units:
        yield one * (_LONG // len(one))


@pytest.mark.parametrize("pattern", _ALL, ids=lambda pattern: pattern.where)
def test_patterns_are_linear(pattern: Pattern) -> None:
    compiled = re.compile(pattern.text, pattern.flags)
    for text in _texts(pattern):
        for method in pattern.methods:
            args = ("", text) if method in ("sub", "subn") else (text,)
            limit_s = _LIMIT_S * max(1, len(text) // _PAIRED)
            with _limit(limit_s, f"{method}: {text[:40]!r}…{text[-9:]!r}"):
                answer = getattr(compiled, method)(*args)
                if method == "finditer":
                    list(answer)


def test_walk_finds_a_quadratic_pattern() -> None:
    for text in (r"[\w-]*pass", r"'.*'(?= at)", r"(?:/\*.*?\*/\s*)*x", r"a+b+c"):
        with pytest.raises(AssertionError):
            test_patterns_are_linear(Pattern("", text, re.DOTALL, frozenset({"search"})))
    assert len(_ALL) > 50
