"""Which statements of a handler set something that another message could see (promise 2.15).

No server says what a transaction has set. So the text of each statement is looked at: for SET and its like, for
`set_config`, and for the names of the functions, triggers and views of the database that set something themselves.

Source: docs/decisions/0041-settings-stay-with-their-message.md
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

from txbox.session import Lasts, SettingChange
from txbox.store.dialect import OURS

# the catalogue is read again after this long
_READ_EVERY_S = 30.0
# texts that are remembered, of at most so many characters, and how far a text is read
_TEXTS_MAX, _KEPT_CHARACTERS_MAX, _TEXT_CHARACTERS_MAX = 2_000, 10_000, 100_000

# an unclosed comment goes to the end, so that no text takes quadratic time
_COMMENT = re.compile(r"--[^\n]*|/\*(?:[^*]|\*(?!/))*+(?:\*/|\Z)")
_WRITES = re.compile(r"\b(?:insert|update|delete|merge|copy|truncate|replace)\b", re.IGNORECASE)

# a word, and whether it is called
_WORD = re.compile(r"(?P<name>[\w$]++)(?P<called>[\"`]?\s*+\()?")
# on PostgreSQL at the begin of a statement; functions; and the rest, wherever it stands
_PG_WORD = (
    r"(?P<word>set|reset|discard|prepare|deallocate|listen"
    r"|create\s++(?:or\s++replace\s++)?(?:(?:local|global)\s++)?temp(?:orary)?)\b\s*+(?P<next>\w++)?"
)
_PG_REST = (
    r"|\b(?P<function>set_config|set_limit|pg_(?:try_)?advisory_lock(?:_shared)?)\b(?P<local>\s*+\([^()]*\btrue\s*+\))?"
    r"|\bdeclare\b[^;]{0,200}?\bwith\s++hold\b"
    r"|\bupdate\s++(?:only\s++)?(?:pg_catalog\s*+\.\s*+)?pg_settings\b"
    r"|\bcreate\s[\w\s]{0,60}?\bpg_temp\s*+\."
    # a table may be called so, too
    r"|\binto\s++(?:(?:local|global)\s++)?temp(?:orary)?\s++"
    r"(?!(?:values|select|default|as|overriding|with|using|from|where)\b)[\w\"]"
)
_PATTERNS = {
    "postgresql": re.compile(
        r"(?:\A|;|\$|\b(?:begin|then|else|loop|atomic)\b)\s*+" + _PG_WORD + _PG_REST, re.IGNORECASE
    ),
    "mysql": re.compile(
        r"(?:\A|;|/\*M?!\d*+|\b(?:atomic|then|else|do|loop)\b)\s*+"
        r"(?P<word>set(?!\s++statement\b)|use|prepare|lock|flush|handler|execute\s++immediate"
        r"|create\s++(?:or\s++replace\s++)?temporary)\b"
        r"|(?P<function>:=|\binto\s++@|\bget_lock(?=\s*+\()|\bcall\b[^;]{0,200}?[(,]\s{0,50}@)",
        re.IGNORECASE,
    ),
    # a pragma without a value, and those with a table's name, only report
    "sqlite": re.compile(
        r"(?:\A|;)\s*+(?P<word>attach\b|detach\b|create\s++temp(?:orary)?\b|pragma\s++(?:\w++\s*+\.\s*+)?"
        r"(?!table_|index_|foreign_key_|integrity_check|quick_check|wal_checkpoint)\w++\s*+[=(]"
        r"|create\s++(?:table|view|trigger|virtual\s++table)\s++(?:if\s++not\s++exists\s++)?[\"`\[]?temp[\"`\]]?\s*+\.)"
        r"|\b(?P<function>load_extension)\b",
        re.IGNORECASE,
    ),
}
# the same in the body of a function, where quotes may enclose a statement
_BODIES = {
    "postgresql": re.compile(
        r"(?:\A|;|\$|'|\(\"|\b(?:begin|then|else|loop|atomic)\b)\s*+" + _PG_WORD + _PG_REST,
        re.IGNORECASE,
    ),
    "mysql": re.compile(
        r"(?P<word>\bset\s++(?:session|local|names|role|transaction|@@)|\bcreate\s++temporary\b|\bprepare\b)"
        r"|(?P<function>:=|\binto\s++@|\bget_lock(?=\s*+\()|(?:\bset|,)\s++@[\w.$]++\s*+=)",
        re.IGNORECASE,
    ),
}


def _lasts(match: re.Match[str]) -> Lasts:
    """How long what a match sets stays on its connection. Only PostgreSQL has more than one answer."""
    groups = match.groupdict()
    if "local" not in groups:
        return Lasts.CONNECTION
    word, following = (groups[name] or "" for name in ("word", "next"))
    if word.lower() in ("prepare", "deallocate"):
        return Lasts.CONNECTION
    local = groups["local"] or (
        word.lower() == "set" and following.lower() in ("local", "transaction", "constraints")
    )
    return Lasts.TRANSACTION if local else Lasts.SESSION


class Settings:
    """What the statements of one database set.

    Args:
        dialect: its name.
    """

    def __init__(self, dialect: str) -> None:
        self._pattern, self._body = _PATTERNS[dialect], _BODIES.get(dialect)
        #: Texts that set nothing, which most are.
        self.quiet: set[str] = set()
        self._texts: dict[str, SettingChange] = {}
        self._rows: Sequence[Sequence[Any]] = ()
        # kind → name → what it sets
        self._named: dict[str, dict[str, SettingChange]] = {}
        #: When the catalogue must be read (again), by `time.monotonic`.
        self.stale_at = 0.0

    # -- what the catalogue says --------------------------------------------------------------

    def learn(self, rows: Sequence[Sequence[Any]]) -> None:
        """Take over what the catalogue has.

        Args:
            rows: kind, name and body: a function, or a table whose trigger (it must be `written`) or a view whose
                definition (it need only be `used`) has this body.
        """
        self.stale_at = time.monotonic() + _READ_EVERY_S
        rows = [tuple(map(_text, row)) for row in rows]
        if rows == self._rows:
            return
        named: dict[str, dict[str, SettingChange]] = {}
        for kind, name, body in rows:
            change = None if self._body is None else self._in(body, self._body)
            if change is not None:
                names = named.setdefault(kind, {})
                known = names.get(name.lower(), change)
                names[name.lower()] = SettingChange(name, max(known.lasts, change.lasts))
        # in this order: see `of`
        self._named, self._rows = named, rows
        self._texts = {}
        self.quiet.clear()

    # -- what a text says ---------------------------------------------------------------------

    def of(self, text: str) -> SettingChange | None:
        """What a statement sets that others could see; None for nothing."""
        if text in self.quiet:
            return None
        if (known := self._texts.get(text)) is not None:
            return known
        rows = self._rows
        change = None if text in OURS else self._read(text[:_TEXT_CHARACTERS_MAX])
        if rows is not self._rows:
            # another thread has read the catalogue in between
            return self.of(text)
        # statements with values in them would fill the memory
        if len(self.quiet) + len(self._texts) >= _TEXTS_MAX:
            self.quiet.clear()
            self._texts = {}
        if len(text) <= _KEPT_CHARACTERS_MAX and change is None:
            self.quiet.add(text)
        elif len(text) <= _KEPT_CHARACTERS_MAX and change is not None:
            self._texts[text] = change
        return change

    def _read(self, text: str) -> SettingChange | None:
        change = self._in(text, self._pattern)
        return self._of_names(text, change) if self._named else change

    def _of_names(self, text: str, change: SettingChange | None) -> SettingChange | None:
        functions, used = self._named.get("function", {}), self._named.get("used", {})
        written = self._named.get("written", {}) if _WRITES.search(text) else {}
        for match in _WORD.finditer(text):
            name = match["name"].lower()
            if match["called"]:
                change = _longer(change, functions.get(name))
            change = _longer(_longer(change, used.get(name)), written.get(name))
        return change

    def _in(self, text: str, pattern: re.Pattern[str]) -> SettingChange | None:
        change = None
        # with its comments as well: what looks like one may be part of a string
        for seen in {text, _COMMENT.sub(" ", text)}:
            for match in pattern.finditer(seen):
                by = " ".join(match[0].split()).lstrip(";$'\" ")[:40]
                change = _longer(change, SettingChange(match["function"] or by, _lasts(match)))
        return change


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _longer(one: SettingChange | None, other: SettingChange | None) -> SettingChange | None:
    if one is None or other is None:
        return one or other
    return max(one, other, key=lambda change: change.lasts)
