"""What a command that changes many messages asks before it does."""

from __future__ import annotations

from txbox.cli.output import confirmed, counted, interactive
from txbox.errors import ConfigurationError

ASKED = """\
Message ids are changed at once. A filter is counted first and asked about;
without a terminal it needs --yes. --dry-run changes nothing and asks nothing."""
CONSENT = f"""\
What is changed must be said: message ids, at least one filter, or --all.
{ASKED}"""


def agreed(verb: str, count: int, what: str, *, yes: bool) -> bool:
    """Say whether a change in bulk may go on.

    Raises:
        ConfigurationError: nobody can be asked and --yes is missing.
    """
    if yes or count == 0:
        return True
    if not interactive():
        raise ConfigurationError(
            f"This would {verb} {counted(count)}: add --yes to do it without being asked, or --dry-run."
        )
    return confirmed(f"{verb.capitalize()} {counted(count, what)}?")
