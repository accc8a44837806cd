"""Values in PostgreSQL's text format, written as psycopg writes them: the same bytes, the same types."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.adapt import PyFormat, Transformer

from txbox.connections.libpq import _dump, _int_arrays  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    ("values", "written"),
    [
        ([], "{}"),
        ([None], "{NULL}"),
        ([None, None], "{NULL,NULL}"),
        (["a", "b"], '{"a","b"}'),
        (["a", "a"], '{"a","a"}'),
        (["NULL", ""], '{"NULL",""}'),
        (["a", None, "b"], '{"a",NULL,"b"}'),
        ([None, "a"], '{NULL,"a"}'),
        (["a,b", "{c}"], '{"a,b","{c}"}'),
        (['a","b', "c"], r'{"a\",\"b","c"}'),
        (["a", '"'], r'{"a","\""}'),
        (['"', '"'], r'{"\"","\""}'),
        (["\\", "a"], r'{"\\","a"}'),
        (["é", "\N{GRINNING FACE}"], '{"é","\N{GRINNING FACE}"}'),
        ([b"\x00", b"\xff"], r'{"\\x00","\\xff"}'),
        ([b"", b""], r'{"\\x","\\x"}'),
        ([b"a", None], r'{"\\x61",NULL}'),
        ([1, 2, None], "{1,2,NULL}"),
        ([3, 3], "{3,3}"),
    ],
)
def test_columns_of_many_rows(values: list[Any], written: str) -> None:
    assert _dump(values) == written.encode()


_EDGES = [edge + step for edge in (0, 2**15, 2**31, 2**63) for step in (-2, -1, 0, 1)]
_numbers = st.one_of(
    st.integers(),
    st.sampled_from(_EDGES),
    st.sampled_from([-edge for edge in _EDGES]),
    st.booleans(),
    st.none(),
)


@given(st.lists(st.lists(_numbers, min_size=1, max_size=4), min_size=1, max_size=3))
def test_int_arrays_are_those_of_psycopg(params: list[list[int | None]]) -> None:
    arrays = _int_arrays(params)
    plain = all(type(number) is int for numbers in params for number in numbers)
    if arrays is None:
        fits = all(
            -(2**63) <= number < 2**63
            for numbers in params
            for number in numbers
            if number is not None
        )
        assert not (plain and fits), "what is plain goes the short way"
        return
    assert plain
    transformer = Transformer()
    values = transformer.dump_sequence(params, [PyFormat.AUTO] * len(params))
    assert arrays == ([bytes(value or b"") for value in values], transformer.types)
