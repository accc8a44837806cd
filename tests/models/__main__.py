"""`make models`: every model with large budgets, and each of its defects; writes docs/reliability/models.md."""

from __future__ import annotations

from tests.models import spin

_PAGE = spin.MODELS.parent / "docs/reliability/models.md"
_MARK = "<!-- written by `make models`: do not edit below -->\n"


def main() -> None:
    if missing := spin.tools():
        raise SystemExit(missing)
    healthy = [
        "| model | budgets | states | seconds | errors |",
        "|---|---|---|---|---|",
    ]
    caught = ["| model | defect | noticed by |", "|---|---|---|"]
    for model in spin.NAMES:
        for budgets in ({}, spin.LARGE[model]):
            checked = spin.check(model, None, **budgets)
            print(checked, flush=True)
            if not checked.whole:
                raise SystemExit(f"{model}: {checked.wrong or 'not all of it fits'}")
            named = (
                ", ".join(f"`{name}` {value}" for name, value in budgets.items()) or "as written"
            )
            healthy.append(
                f"| `{model}.pml` | {named} | {checked.states:,} | {checked.seconds:.1f} | 0 |"
            )
        for defect in spin.defects(model):
            checked = spin.check(model, defect)
            print(checked, flush=True)
            if checked.wrong is None:
                raise SystemExit(f"{model}: nothing notices {defect}")
            noticed = checked.wrong.replace("|", "\\|")
            caught.append(f"| `{model}.pml` | `{defect}` | `{noticed}` |")
    head = _PAGE.read_text().partition(_MARK)[0]
    _PAGE.write_text(head + _MARK + "\n" + "\n".join([*healthy, "", *caught]) + "\n")


if __name__ == "__main__":
    main()
