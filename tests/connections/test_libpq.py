"""What libpq is given: values in PostgreSQL's text format."""

from __future__ import annotations

from typing import Any

import pytest

from txbox.connections.libpq import _dump  # pyright: ignore[reportPrivateUsage]


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
