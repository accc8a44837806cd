"""init, and schema print | check | apply."""

from __future__ import annotations

import argparse
import re
from typing import Any

from txbox.admin import Admin
from txbox.cli import add_command, print_error
from txbox.cli.options import add_options, count, opened
from txbox.cli.output import print_json, print_line
from txbox.errors import ConfigurationError
from txbox.policy import Retention
from txbox.store import schema as tables
from txbox.store.dialect import Dialect, dialect, qualified
from txbox.store.partitions import KINDS, Kind, Partitioning

_PLAIN_ROLE = re.compile(r"[a-z_][a-z0-9_]*")
# MySQL's user and host, with or without quotes
_ACCOUNT = re.compile(r"['`\"]?([^'`\"@]*)['`\"]?@['`\"]?([^'`\"@]+)['`\"]?")


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    init = add_command(commands, "init", _apply, common)
    schema = add_command(
        commands, "schema", description="The SQL of the tables: print it, check it, apply it."
    )
    actions = schema.add_subparsers(
        dest="action", required=True, metavar="COMMAND", title="commands"
    )
    shown = add_command(actions, "print", _print, common, help="print the SQL, without connecting")
    add_command(
        actions, "check", _check, common,
        help="say whether this release works with the tables",
    )  # fmt: skip
    apply = add_command(
        actions, "apply", _apply, common, help="create or upgrade the tables, like `txbox init`"
    )
    parted = (
        "for new tables on PostgreSQL: partition the inbox by the time in its ids (uuid7, ulid), so that pruning "
        "drops whole partitions, or by a hash of the id"
    )
    for command in (init, apply, shown):
        add_options(command, {"--partition KIND": parted}, metavar=None, choices=KINDS)
    known = ["postgresql", "mysql", "sqlite"]
    add_options(shown, {"--dialect NAME": "mysql is also MariaDB"}, metavar=None, choices=known)
    now = {"--from N": "the version of the tables now (default 0: none)"}
    add_options(shown, now, dest="after", type=_version, default=0)
    wanted = {"--to N": f"the version to reach (default {tables.VERSION}, this release)"}
    add_options(shown, wanted, dest="upto", default=tables.VERSION)
    granted = (
        "print GRANT statements instead, for each kind of role: consumer, relay, maintenance, operator, readonly, "
        "viewer; with KIND=ROLE only for that kind, and for your role"
    )
    add_options(shown, {"--grants KIND=ROLE": granted}, nargs="*")


def _version(text: str) -> int:
    return 0 if text == "0" else count(text)


def _apply(args: argparse.Namespace) -> int:
    """Creates the tables, or upgrades them to this release. Running it again does no harm. It needs a role that may
    create tables; `txbox schema print` prints the same SQL for whoever has one.
    """
    with opened(args) as app, Admin(app) as admin:
        database, partitioning = app.database, _partitioning(args, app.retention)
        before, after = admin.on_database(
            tables.apply, app.store.dialect, database.schema, partitioning
        )
        if args.json:
            print_json({"before": before, "after": after})
        elif before == after:
            print_line(
                f"The txbox tables in {database.name} are at version {after}: nothing to do."
            )
        elif before:
            print_line(
                f"The txbox tables in {database.name} went from version {before} to {after}."
            )
        else:
            print_line(f"The txbox tables in {database.name} are ready (version {after}).")
        _warn_of_creators(admin)
    return 0


def _warn_of_creators(admin: Admin) -> None:
    """Say who could have code of theirs run by whoever uses the tables."""
    database = admin.app.database
    own_dialect = dialect(database.dialect.name, database.schema)
    if creators := admin.on_database(tables.creators, own_dialect):
        print_error(
            f"warning: {', '.join(creators)} may create in the schema of the txbox tables, and so run code as whoever "
            "uses them: `REVOKE CREATE ON SCHEMA … FROM …`, or keep the tables in a schema of their own."
        )


def _partitioning(args: argparse.Namespace, retention: Retention) -> Partitioning | None:
    wanted: Kind | None = args.partition
    return wanted and Partitioning(wanted, retention.partition, retention.ahead)


def _check(args: argparse.Namespace) -> int:
    """Says whether this release works with the tables. Exit status: 0 yes, 2 no, with the command to run."""
    with opened(args) as app, Admin(app) as admin:
        state = admin.on_database(tables.check, app.store.dialect)
        if args.json:
            print_json({"version": state.version, "schema": state.schema, "usable": True})
        else:
            print_line(
                f"The txbox tables in {app.database.name} are at version {state.version}, which fits."
            )
        _warn_of_creators(admin)
    return 0


def _print(args: argparse.Namespace) -> int:
    """Prints the SQL that creates or upgrades the tables. It connects to nothing: --dialect is enough, or an --app
    or --database whose dialect it is.
    """
    sql_dialect, schema, kept = _dialect(args)
    if args.grants is not None:
        sql = _grants(sql_dialect, schema, args.grants, args.partition)
    elif args.upto > tables.VERSION:
        raise ConfigurationError(
            f"This release knows the tables up to version {tables.VERSION}, not {args.upto}: upgrade txbox."
        )
    else:
        sql = tables.migration_text(
            sql_dialect, schema, after=args.after, upto=args.upto,
            partitioning=_partitioning(args, kept),
        )  # fmt: skip
        if args.after >= args.upto:
            sql = f"-- There is no migration from {args.after} to {args.upto}."
    if args.json:
        print_json({"dialect": sql_dialect.name, "schema": schema, "sql": sql})
    else:
        print_line(sql.rstrip())
    return 0


def _dialect(args: argparse.Namespace) -> tuple[Dialect, str | None, Retention]:
    if args.dialect is not None:
        return dialect(args.dialect, args.schema), args.schema, Retention()
    app = opened(args)
    return app.database.dialect, app.database.schema, app.retention


def _role(sql_dialect: Dialect, name: str) -> str:
    """The name of a role as SQL, as it stands: quoted unless it is plain, or quoted by whoever gave it."""
    if _PLAIN_ROLE.fullmatch(name):
        return name
    mark = "`" if sql_dialect.name == "mysql" else '"'
    if sql_dialect.name == "mysql" and (account := _ACCOUNT.fullmatch(name)):
        user, host = (part.replace("`", "``") for part in account.groups())
        return f"`{user}`@`{host}`"
    return f"{mark}{name.replace(mark, mark * 2)}{mark}"


def _grants(
    sql_dialect: Dialect, schema: str | None, wanted: list[str], partition: Kind | None
) -> str:
    kinds = tables.grants(sql_dialect, partition)
    if not kinds:
        return "-- SQLite has no roles: the rights are those of the file."
    names: dict[str, str] = {}
    for pair in wanted:
        kind, separator, role = pair.partition("=")
        if not separator or not role or kind not in kinds:
            raise ConfigurationError(
                f"--grants takes KIND=ROLE, not {pair!r}: the kinds are {', '.join(kinds)}."
            )
        names[kind] = role
    if not wanted:
        names = {kind: f"txbox_{kind}" for kind in kinds}
    parts: list[str] = []
    for kind, role in names.items():
        lines = kinds[kind]
        if schema is not None:
            lines = f'GRANT USAGE ON SCHEMA "{schema}" TO <{kind}>;\n{qualified(lines, schema)}'
        parts.append(f"-- {kind}\n{lines.replace(f'<{kind}>', _role(sql_dialect, role))}")
    return "\n\n".join(parts)
