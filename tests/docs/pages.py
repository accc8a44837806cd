"""The pages of the documentation, cut into what can be checked: headings, links, fenced blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language, its text and the line before its first."""

    language: str
    text: str
    line: int


@dataclass(frozen=True, slots=True)
class Page:
    """One Markdown file."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def text(self) -> str:
        return self.path.read_text()

    @property
    def prose(self) -> str:
        """The text without its fenced blocks."""
        return _FENCE.sub("", self.text)

    def blocks(self) -> Iterator[Block]:
        text = self.text
        for found in _FENCE.finditer(text):
            yield Block(found[1], found[2], text.count("\n", 0, found.start(2)))

    def headings(self) -> list[str]:
        return _HEADING.findall(self.prose)

    def anchors(self) -> set[str]:
        return {_slug(heading) for heading in self.headings()}

    def links(self) -> list[str]:
        return _LINK.findall(self.prose)


def _slug(heading: str) -> str:
    kept = re.sub(r"[^\w\- ]", "", heading.lower())
    return kept.strip().replace(" ", "-")


@cache
def all_pages() -> tuple[Page, ...]:
    """README, CHANGELOG, CONTRIBUTING and everything under docs/."""
    top = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
    return tuple(Page(path) for path in (*top, *sorted((ROOT / "docs").rglob("*.md"))))


def page(name: str) -> Page:
    return Page(ROOT / name)
