"""Every link inside the documentation leads somewhere, and every page can be reached from the index."""

from __future__ import annotations

import pytest

from tests.docs.pages import ROOT, Page, all_pages, page

# written by `make bench`: on a fresh clone without results it may be missing
_PAGES = all_pages()


@pytest.mark.parametrize("linked", _PAGES, ids=lambda each: each.name)
def test_links_resolve(linked: Page) -> None:
    for link in linked.links():
        if "://" in link or link.startswith("mailto:"):
            continue
        target, _, anchor = link.partition("#")
        path = (linked.path.parent / target).resolve() if target else linked.path
        assert path.exists(), f"{linked.name} links {link}, which is not there"
        assert path.is_relative_to(ROOT), f"{linked.name} links {link}, outside of the repository"
        if anchor:
            assert anchor in Page(path).anchors(), f"{linked.name} links {link}: no such heading"


def test_every_page_is_linked_from_the_index_or_the_index_of_the_decisions() -> None:
    indexes = page("docs/index.md"), page("docs/decisions/index.md")
    linked = {
        (index.path.parent / link.partition("#")[0]).resolve()
        for index in indexes
        for link in index.links()
    }
    missing = [
        each.name
        for each in _PAGES
        if each.path.is_relative_to(ROOT / "docs") and each.path not in linked
    ]
    assert missing == ["docs/index.md"]


def test_decisions_that_the_code_names_exist() -> None:
    import re

    for source in (ROOT / "src").rglob("*"):
        if source.suffix in (".py", ".sql"):
            for name in re.findall(r"docs/[\w/.-]+\.md", source.read_text()):
                assert (ROOT / name).exists(), f"{source.relative_to(ROOT)} names {name}"
