"""Changes in bulk, as a form asks for them."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from txbox.admin import Admin, Changed, views
from txbox.admin.changes import ChangeOptions, result_of
from txbox.admin.tables import Filter, InboxFilter, Verb
from txbox.text import counted

# characters of a filter in a question
_NAMED = 80


@dataclass(frozen=True, slots=True)
class Progress:
    """What a change has done so far.

    Attributes:
        count: messages that are changed.
        notes: what happened, in sentences.
        state: how it ended: "done", "stopped" by itself, or "failed"; until then "unfinished".
    """

    count: int = 0
    notes: Sequence[str] = ()
    state: Literal["unfinished", "done", "stopped", "failed"] = "unfinished"


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedChange:
    """A change that a form asks for: of chosen messages, or of all that match a filter."""

    kind: type[Filter[Any, Any]]
    verb: Verb | Literal["replay"]
    filters: list[Filter[Any, Any]]
    criteria: dict[str, str]
    picked: list[str]
    #: The route to reroute to, "any" for none in particular; or the id to accept under.
    options: dict[str, str]
    canary: bool

    @property
    def route(self) -> str:
        """Where a reroute goes, as the outbox has it."""
        return "" if self.options["to"] == "any" else self.options["to"]

    @property
    def extent(self) -> str:
        """What its filter means, in words."""
        return (
            ""
            if self.picked
            else views.extent(self.kind.table, cast("Verb", self.verb), self.criteria)
        )

    def needs_reason(self, count: int) -> bool:
        """Whether it is of so many that the audit must say why."""
        return not self.picked or count > 1

    def preview(self, admin: Admin) -> list[Changed]:
        """What it would do."""
        return [result_of(self._batches(admin, where, dry_run=True)) for where in self.filters]

    def _batches(self, admin: Admin, where: Any, **how: Any) -> Iterable[Changed]:
        if self.verb == "replay":
            return [_replayed(admin, where, how)]
        options: dict[str, Any] = {"to": self.route} if self.verb == "reroute" else self.options
        return admin.batches(self.verb, where, **options, **how)

    def question(self, count: int) -> str:
        """Name the change and its extent."""
        table, criteria, noun = self.kind.table, self.criteria, self.kind.table.noun
        if not self.picked:
            noun = views.noun_of(table, cast("Verb", self.verb), criteria.get("status"))
        given = ", ".join(
            f"{views.label(name)} {value}" for name, value in criteria.items() if name != "status"
        )
        # the page repeats the filter; a sentence with all of a long one is hard to read
        of = " that match the filter" if len(given) > _NAMED else f" of {given}" if given else ""
        to = f" to {self.options['to']}" if self.verb == "reroute" else ""
        if self.canary:
            to = ": one, then ten, then the rest"
        return f"{self.verb.capitalize()} {counted(count, noun)}{of}{to}?"

    def run(self, admin: Admin, most: int, who: ChangeOptions) -> Generator[Progress]:
        """Change at most so many messages, and say after each batch what has happened.

        Args:
            who: actor and reason, for the audit.
        """
        how: ChangeOptions = {**who, "most": most}
        done, notes, sentence = 0, list[str](), ""
        if self.canary:
            assert isinstance(self.filters[0], InboxFilter)
            state: Literal["done", "stopped"] = "done"
            for redriven in admin.canary_steps(self.filters[0], **how):
                done, notes = redriven.count, [step.sentence for step in redriven.steps]
                yield Progress(done, notes)
                sentence, state = redriven.sentence, "stopped" if redriven.stopped else "done"
            yield Progress(done, [*notes, sentence], state)
            return
        for where in self.filters:
            if done >= most:
                break
            before, remarks = done, list[str]()
            for changed in self._batches(admin, where, **{**how, "most": most - before}):
                done = before + changed.count
                remarks = list(views.refusals(self.kind.table, changed.refused))
                if changed.spared:
                    remarks.insert(0, f"{views.spared(changed.spared)}, and retry it by itself.")
                yield Progress(done, [self._done(done), *notes, *remarks])
            notes += remarks
        yield Progress(done, [self._done(done), *notes], "done")

    def _done(self, count: int) -> str:
        return views.done(count, self.kind.table.noun, self.verb)


def _replayed(admin: Admin, where: InboxFilter, how: Mapping[str, Any]) -> Changed:
    """Replay one message: a single run, without batches or progress."""
    given = {name: how[name] for name in ("actor", "reason", "dry_run") if name in how}
    replayed = admin.replay(where, **given)
    key = {"consumer": where.consumer or "", "message_id": where.message_id or ""}
    failed = tuple(
        {
            **key,
            "reason": f"its handler failed ({failure.error_type}), and it is processed as before",
        }
        for failure in replayed.failures
    )
    return Changed(
        action="replay", dry_run=replayed.dry_run, spared=0, refused=failed,
        count=replayed.count if replayed.dry_run else replayed.processed,
        sample=(key,) if replayed.count else (),
    )  # fmt: skip
