"""The builder of the site: its navigation has every page, and no link of a page is lost on the way."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT, all_pages
from tests.docs.test_troubleshooting import _build


def test_the_navigation_and_llms_txt_have_every_page() -> None:
    build = _build()
    navigation = build.navigation()
    listed = build.llms([{"txbox": "index.md"}, *navigation])
    missing = [
        each.name
        for each in all_pages()
        if f"]({build._place(each.path)})" not in listed and each.name != "docs/index.md"
    ]
    assert missing == []
    kinds = [next(iter(section)) for section in navigation]
    assert kinds[:4] == ["Tutorial", "How-to", "Reference", "Explanation"]


def test_links_out_of_docs_lead_to_what_is_staged() -> None:
    build = _build()
    path = ROOT / "docs/howto/service.md"
    text = "[a](../../examples/service.py) [b](kafka.md#sources) [c](https://a.example) [d](../../README.md)"
    assert build._relinked(path, text) == (
        "[a](../files/examples/service.py.md) [b](kafka.md#sources) [c](https://a.example)"
        " [d](../project/readme.md)"
    )


def test_searching_the_site_finds_no_test() -> None:
    build = _build()
    build.stage()
    (test, *_) = (build.PAGES / "files/tests").rglob("*.py.md")
    (example, *_) = (build.PAGES / "files/examples").rglob("*.py.md")
    assert test.read_text().startswith("---\nsearch:\n  exclude: true\n---\n")
    assert example.read_text().startswith("# examples/")


def test_the_api_as_markdown_has_signatures_and_docstrings() -> None:
    build = _build()
    directive = re.match(r"^::: (\S+)$", "::: txbox.inbox.Inbox")
    assert directive is not None
    text = build._api(directive)
    assert "### Inbox.accept\n" in text.replace("####", "###")
    assert "payload" in text
    assert "Raises" in text


def test_every_public_name_is_in_the_api() -> None:
    import txbox

    page = (ROOT / "docs/reference/api.md").read_text()
    names = set(re.findall(r"^::: \S+\.(\w+)$", page, re.MULTILINE))
    assert set(txbox.__all__) - names == {"__version__"}
