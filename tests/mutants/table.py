"""The mutants: each is one text of the source and what stands in its place, and a command for each way to catch it.

A mutant is called after what it changes. Its text is short and characteristic, so that it is found again where code has
moved; a test says when it is not, or no longer once. Instead of a command there is the reason why a way cannot see it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.mutants.commands import (
    Command,
    Defect,
    chaos,
    machine,
    pytest_of,
    sweep,
    sweep_of_broker,
)


@dataclass(frozen=True)
class Mutant:
    """One deliberate defect.

    Args:
        does: what is wrong with it, in a sentence.
        file: below `src/txbox`, where the text was last seen.
        text, instead: the text stands there once, and this is put in its place.
    """

    name: str
    does: str
    file: str
    text: str
    instead: str
    model: Defect | str
    machine: Command | str
    tests: Command
    sweep: Command | str
    chaos: Command | str

    def applied(self, text: str) -> str:
        return text.replace(self.text, self.instead)

    def way(self, name: str) -> Command | Defect | str:
        """How it should be caught in one of `commands.WAYS`; a text is the reason why it cannot."""
        how: Command | Defect | str = getattr(self, name)
        return how


def located(mutant: Mutant, source: Path) -> Path:
    """The one file of a package that has the text of a mutant, once: that which it names, or where it has moved.

    Raises:
        LookupError: no file has it, several do, or one has it several times.
    """
    named = source / mutant.file
    if named.is_file() and mutant.text in named.read_text():
        files = [named]
    else:
        files = [
            path
            for path in sorted(source.rglob("*"))
            if path.suffix in (".py", ".sql") and mutant.text in path.read_text()
        ]
    if len(files) != 1:
        where = ", ".join(str(path.relative_to(source)) for path in files) or "no file"
        raise LookupError(f"{mutant.name}: its text stands in {where}; it must be in one")
    if (times := files[0].read_text().count(mutant.text)) != 1:
        raise LookupError(f"{mutant.name}: its text stands {times} times in {mutant.file}")
    return files[0]


# -- why a way cannot see a mutant ------------------------------------------------------------------

# of the models
_ONE_MESSAGE = "one id, one consumer, one row: no batches, payloads or settings"
_NO_BUDGETS = "nothing counts attempts or starts there"
_NO_OPERATOR = "no operator, no maintenance but rescue and retention"
_NO_ROUTES = "one topic and one route"
_NO_KEYS = "no order of a key"
_ATOMIC_LEASE = "a relay's look and its lease are one step there"
_ANY_TIME = "a lease may expire there at any time: the fence is what counts"
# of the state machine
_NO_SOURCE = "no source, no lane and no acknowledgement there"
_NO_OUTBOX = "nothing is staged there"
_ONE_BY_ONE = "one step after the other, in one process: nobody meets anybody"
_NO_NETWORK = "no answer and no connection is lost there"
_HONEST = "its handlers keep to the contract"
_NO_LEASE_ENDS = "leases end at once there, and nothing is given back"
_NO_INNODB = "it runs on SQLite and PostgreSQL"
_ONE_AT_A_TIME = "it delivers one message at a time, without a key"
_PRUNES_ALL = "it prunes all that is finished, and so does the mutant"
# of the sweep
_ONE_WORKER = "one worker after the other: nobody else meets its rows"
_KILLED = "whoever is killed sees no answer, lost or wrong"
_NEVER_PRUNED = "nothing is pruned there"
_ONE_CONSUMER = "its messages have one consumer each"
_ONE_TOPIC = "one topic, one type, no key and no other payload"
_NO_POISON = "nothing fails more than once, or at COMMIT"
_NO_KILLER = "no message kills its process each time"
_NOT_MADE_AGAIN = "no topic is made again there"
# of chaos
_APART = "handlers that break the contract are counted apart"
_NOT_OLD = "nothing gets as old as the retention"
_ANY_STARTS = "starts are without a bound there, as workers are killed all the time"
_COSTS_TIME = "it costs time, and no message"
_DEFINITE = "its poison at COMMIT has a code that is definite"
_NOT_THERE = "no handler there does this"
_NOT_THIS_FAST = "a server would have to be killed within the microseconds in which a COMMIT is shown and not written"
_ONE_RELAY = "each App has one relay: no other leases a row that it has seen"
_NOT_ANCHORED = "offsets are not anchored there"

_PG, _LITE = "postgresql", "sqlite"
_CHAOS = chaos(_PG, "redis")
_CHAOS_LITE = chaos(_LITE, "redis")
# two must meet within the milliseconds between two statements
_CHAOS_LONG = chaos(_PG, "redis", minutes=5)

# -- what is acknowledged, and when -----------------------------------------------------------------

_ACKNOWLEDGED = (
    Mutant(
        "ack-first",
        "A delivery is acknowledged when it arrives, before anything is done about it.",
        "worker/pump.py",
        "self._bytes += sum(sizes)",
        "self._bytes += sum(sizes)\n        self.consumer.settle(received)",
        model=Defect("inbox", "ACK_FIRST"),
        machine=_NO_SOURCE,
        tests=pytest_of("worker/test_worker.py::test_a_delivery_is_settled_after_all_its_consumers", only=_PG),
        sweep=sweep_of_broker("redis"),
        chaos=_CHAOS,
    ),
    Mutant(
        "ack-before-the-last-consumer",
        "A delivery is acknowledged as soon as one of two consumers is done with it.",
        "worker/lane.py",
        "return self._unsettled_parts == 0",
        "return self._unsettled_parts == 1",
        model=_ONE_MESSAGE,
        machine=_NO_SOURCE,
        tests=pytest_of("worker/test_worker.py::test_a_delivery_is_settled_after_all_its_consumers", only=_PG),
        sweep=_ONE_CONSUMER,
        chaos=_CHAOS,
    ),
    Mutant(
        "ack-what-another-holds",
        "A delivery whose id another transaction holds is acknowledged, whatever becomes of that transaction.",
        "worker/lane.py",
        "self._claim_later(work)\n                continue\n            done.append(work)",
        "done.append(work)\n                continue\n            done.append(work)",
        model=_ONE_MESSAGE,
        machine=_NO_SOURCE,
        tests=pytest_of(
            "worker/test_worker.py::test_an_id_that_another_transaction_holds_is_claimed_again", only=_PG
        ),
        sweep=_ONE_WORKER,
        chaos=_CHAOS_LONG,
    ),
    Mutant(
        "ack-on-ambiguous-commit",
        "A COMMIT whose answer was lost counts as done.",
        "processing/attempt.py",
        "if ran.end is End.COMMITTED:",
        "if ran.end in (End.COMMITTED, End.AMBIGUOUS):",
        model=Defect("inbox", "ACK_AMBIGUOUS"),
        machine=_NO_NETWORK,
        tests=pytest_of(
            "processing/test_transaction_commits.py::test_ambiguous_commit_of_a_delivery",
            only=f"{_PG} and before",
        ),
        sweep=_KILLED,
        chaos=_CHAOS,
    ),
    Mutant(
        "quarantine-without-row",
        "What is set aside is acknowledged and reported, and stands nowhere.",
        "processing/attempt.py",
        "await db.together((aside,))",
        "_ = aside",
        model=_ONE_MESSAGE,
        machine=machine(_LITE),
        tests=pytest_of("scenarios/test_duplicates.py::test_id_reuse_with_different_payload", only=_LITE),
        sweep=_ONE_TOPIC,
        chaos=_CHAOS,
    ),
    Mutant(
        "parked-without-payload",
        "A failure is recorded and its delivery acknowledged, but the payload is not there for a retry.",
        "store/inbox.py",
        '"has_payload": not bare,',
        '"has_payload": False,',
        model=_ONE_MESSAGE,
        machine=machine(_LITE),
        tests=pytest_of("scenarios/test_failures.py::test_business_logic_failure", only=_LITE),
        sweep=sweep("retried", _LITE),
        chaos=_CHAOS_LITE,
    ),
    Mutant(
        "payload-not-taken-back",
        "A redelivery of an unfinished message whose payload is missing is acknowledged, and its payload with it.",
        "processing/attempt.py",
        "if not row.has_payload:",
        'if not row.has_payload and row.status == "":',
        model=_ONE_MESSAGE,
        machine=_ONE_AT_A_TIME,
        tests=pytest_of(
            "store/test_leases.py::test_failed_row_without_payload_gets_that_of_the_redelivery", only=_LITE
        ),
        sweep=_NO_POISON,
        chaos=_NOT_THERE,
    ),
    Mutant(
        "less-durable-commit",
        "A handler that sets synchronous_commit decides how durable the message is that is acknowledged next.",
        "store/postgresql.sql",
        "ELSE txbox_refuse() END,\n       [flushed]",
        "ELSE txbox_refuse() END",
        model=_ONE_MESSAGE,
        machine=_HONEST,
        tests=pytest_of("processing/test_transaction.py::test_handler_cannot_make_its_commit_less_durable"),
        sweep=_HONEST,
        chaos=_NOT_THERE,
    ),
    Mutant(
        "copy-writes-nothing",
        "On MySQL and MariaDB a copy is acknowledged for a row that it has only read, on disk or not.",
        "store/mysql.sql",
        "updated_at = txbox_inbox.updated_at + INTERVAL 1 MICROSECOND",
        "updated_at = txbox_inbox.updated_at",
        model=_ONE_MESSAGE,
        machine=_NO_INNODB,
        tests=pytest_of(
            "processing/test_transaction_durable.py::test_a_copy_is_acknowledged_after_a_commit_that_wrote"
        ),
        sweep=_ONE_WORKER,
        chaos=_NOT_THIS_FAST,
    ),
    Mutant(
        "offset-of-a-deleted-topic",
        "What was committed of a deleted Kafka topic is taken for an offset of the one made again under its name.",
        "brokers/kafka/partitions.py",
        "if _differ(marked, uuid) or (",
        "if False and (",
        model=_ONE_MESSAGE,
        machine=_NO_SOURCE,
        tests=pytest_of(
            "brokers/test_kafka_recreated.py::test_it_is_read_by_whoever_comes_after_a_worker_that_did_not_notice"
        ),
        sweep=_NOT_MADE_AGAIN,
        chaos=chaos("mysql", "kafka", minutes=4),
    ),
    Mutant(
        "watermark-at-highest",
        "Kafka's offset is committed up to the last message that is done, over those in front of it that are not.",
        "brokers/kafka/partitions.py",
        "while self.waiting and self.waiting[0].settled:\n            self.front = self.waiting.popleft()",
        "self.waiting.remove(record)\n"
        "        if self.front is None or record.offset > self.front.offset:\n"
        "            self.front = record",
        model=Defect("kafka", "HIGHEST"),
        machine=_NO_SOURCE,
        tests=pytest_of("brokers/test_kafka.py::test_only_the_gapless_front_is_committed"),
        sweep=sweep_of_broker("kafka"),
        chaos=chaos(_PG, "kafka"),
    ),
    Mutant(
        "failover-not-noticed",
        "A database that lost its last commits is told by its position alone, not by its history.",
        "brokers/base.py",
        "if self.history != later.history:",
        "if not later.history:",
        model=Defect("failover", "POSITION_ONLY"),
        machine=_NO_SOURCE,
        tests=pytest_of("brokers/test_kafka_anchor.py::test_what_was_lost_since_the_last_anchor_is_noticed"),
        sweep=_KILLED,
        chaos=_NOT_ANCHORED,
    ),
    Mutant(
        "anchor-goes-back",
        "Of two that store how far a partition is, the last one wins, and not the one that is further.",
        "store/postgresql.sql",
        "SET state = greatest(job.state::bigint, excluded.state::bigint)::text",
        "SET state = excluded.state",
        model=_ONE_MESSAGE,
        machine=_NO_SOURCE,
        tests=pytest_of("brokers/test_kafka_anchor.py::test_two_writers_never_move_an_anchor_back"),
        sweep=_ONE_WORKER,
        chaos=_NOT_ANCHORED,
    ),
    Mutant(
        "multiple-ack-over-open",
        "One acknowledgement for all up to a delivery on RabbitMQ covers some that are not done.",
        "brokers/rabbitmq/source.py",
        "if tag not in done:\n                break",
        "if tag not in done:\n                continue",
        model=Defect("kafka", "HIGHEST"),
        machine=_NO_SOURCE,
        tests=pytest_of("brokers/test_rabbitmq.py::test_only_what_is_settled_is_gone"),
        sweep=sweep_of_broker("rabbitmq"),
        chaos=chaos(_LITE, "rabbitmq"),
    ),
    Mutant(
        "file-passes-open-lines",
        "The position in a file goes up to the last line that is done, over those before it that are not.",
        "brokers/file.py",
        "while self.waiting and self.waiting[0].settled:\n            self.front = self.waiting.popleft().end",
        "self.waiting.remove(line)\n        self.front = max(self.front, line.end)",
        model=Defect("kafka", "HIGHEST"),
        machine=_NO_SOURCE,
        tests=pytest_of("brokers/test_file.py::test_only_the_gapless_settled_front_is_passed_over"),
        sweep=pytest_of(
            "worker/test_worker_killed.py::test_a_worker_killed_at_every_point_loses_and_doubles_nothing",
            only=_LITE,
            limit_s=400,
        ),
        chaos="no file is read there",
    ),
    Mutant(
        "progress-over-a-failover",
        "The position in a file is saved over an older one, of a database that has lost what came between.",
        "store/common.sql",
        "AND coalesce(state, '') = coalesce(:before::text, '')",
        "AND coalesce(:before::text, '') <> '-'",
        model=Defect("failover", "NO_LOOK"),
        machine=_NO_SOURCE,
        tests=pytest_of("brokers/test_file.py::test_a_database_that_lost_its_last_transactions_gets_them_again"),
        sweep=_KILLED,
        chaos="no file is read there",
    ),
)  # fmt: skip

# -- the claim, the guard and the end of a transaction ----------------------------------------------

_TRANSACTION = (
    Mutant(
        "check-then-act",
        "An id is looked for and then written: two who look at the same time both have it.",
        "store/postgresql.sql",
        "ON CONFLICT ON CONSTRAINT txbox_inbox_pkey DO NOTHING",
        "ON CONFLICT ON CONSTRAINT txbox_inbox_pkey DO UPDATE SET updated_at = clock_timestamp()\n"
        "   WHERE NOT EXISTS (SELECT 1 FROM txbox_inbox AS seen\n"
        "                      WHERE seen.consumer = txbox_inbox.consumer\n"
        "                        AND seen.message_id = txbox_inbox.message_id)",
        model=Defect("inbox", "CHECK_THEN_ACT"),
        machine=_ONE_BY_ONE,
        tests=pytest_of("scenarios/test_duplicates.py::test_concurrent_duplicate_messages", only=_PG),
        sweep=_ONE_WORKER,
        chaos=_CHAOS,
    ),
    Mutant(
        "known-id-is-new",
        "A claim of an id that has a row is won, whatever that row says.",
        "store/sqlite.sql",
        "VALUES (:consumer, :message_id, 'processed', :topic, :type, :key, :sequence, [now], :payload_hash)\n"
        "ON CONFLICT (consumer, message_id) DO NOTHING",
        "VALUES (:consumer, :message_id, 'processed', :topic, :type, :key, :sequence, [now], :payload_hash)\n"
        "ON CONFLICT (consumer, message_id) DO UPDATE SET updated_at = [now]",
        model=Defect("inbox", "CHECK_THEN_ACT"),
        machine=machine(_LITE),
        tests=pytest_of("scenarios/test_duplicates.py::test_duplicate_storm", only=_LITE),
        sweep=sweep("inline", _LITE),
        chaos=_CHAOS_LITE,
    ),
    Mutant(
        "no-guard",
        "The database lets a handler commit half a message.",
        "store/migrations/postgresql/0001_tables.sql",
        "IF NOT EXISTS (SELECT FROM pg_catalog.pg_stat_get_subscription(NULL) AS worker",
        "IF false AND NOT EXISTS (SELECT FROM pg_catalog.pg_stat_get_subscription(NULL) AS worker",
        model=Defect("inbox", "NO_GUARD"),
        machine=_HONEST,
        tests=pytest_of(
            "connections/test_base_conformance.py::test_a_handler_that_commits_never_leaves_a_processed_row",
            only="psycopg",
        ),
        sweep=_HONEST,
        chaos=_APART,
    ),
    Mutant(
        "no-close",
        "The end of a transaction does not look whether it is still the one that claimed the message.",
        "store/postgresql.sql",
        "WHEN :token::text <> '' AND current_setting('txbox.token', true) = :token::text",
        "WHEN :token::text <> ''",
        model=Defect("inbox", "NO_CLOSE"),
        machine=_HONEST,
        tests=pytest_of(
            "connections/test_base_conformance.py::test_a_handler_that_rolls_back_is_found_out_at_close",
            only="psycopg",
        ),
        sweep=_HONEST,
        chaos=_CHAOS,
    ),
    Mutant(
        "no-canary",
        "On MySQL and MariaDB nothing shows that a handler has committed.",
        "store/mysql.sql",
        "RELEASE SAVEPOINT [canary]",
        "DO 0",
        model=Defect("inbox", "NO_GUARD"),
        machine="it runs on SQLite and PostgreSQL",
        tests=pytest_of("connections/test_mysql.py::test_whatever_ends_the_transaction_is_found_out"),
        sweep=_HONEST,
        chaos=_APART,
    ),
    Mutant(
        "failed-effects-stay",
        "What the culprit of a batch has written is not rolled back before the others go on.",
        "processing/transaction.py",
        "await undo(db)",
        "_ = undo",
        model=_ONE_MESSAGE,
        machine=_ONE_AT_A_TIME,
        tests=pytest_of("processing/test_attempt_batches.py::test_a_culprit_costs_only_itself", only=_LITE),
        sweep=sweep("batched", _LITE),
        chaos=_CHAOS_LITE,
    ),
    Mutant(
        "settings-leak",
        "What one message of a batch sets is seen by those behind it.",
        "processing/calls.py",
        "if watched is not None and watched.changed is not None and not handler.options.shares:",
        "if watched is not None and watched.changed is not None and handler.options.batch:",
        model=_ONE_MESSAGE,
        machine=_HONEST,
        tests=pytest_of(
            "connections/test_settings.py::test_no_neighbour_sees_what_a_message_sets",
            only="set_local and psycopg",
        ),
        sweep=_HONEST,
        chaos=_NOT_THERE,
    ),
    Mutant(
        "unsorted-batches",
        "A batch claims its ids as they came, so that two batches lock the same ids in different orders.",
        "processing/transaction.py",
        "sorted(arrivals, key=_MESSAGE_ID) if together else arrivals,",
        "arrivals,",
        model=_ONE_MESSAGE,
        machine=_ONE_AT_A_TIME,
        tests=pytest_of(
            "store/test_inbox_claims.py::test_a_batch_that_waits_for_an_id_holds_none_that_sorts_behind_it",
            only="plain",
        ),
        sweep=_ONE_WORKER,
        chaos=_COSTS_TIME,
    ),
    Mutant(
        "payload-not-compared",
        "A known id is a duplicate, whatever it carries.",
        "store/inbox.py",
        "return self.payload_hash is not None and hashed is not None and self.payload_hash != hashed",
        "return False",
        model=_ONE_MESSAGE,
        machine=machine(_LITE),
        tests=pytest_of("test_identity_payloads.py::test_payload_is_compared_with_the_row", only=_LITE),
        sweep=_ONE_TOPIC,
        chaos=chaos(_PG, "webhook"),
    ),
    Mutant(
        "payload-not-compared-in-batches",
        "In a batch, a known id is a duplicate, whatever it carries.",
        "store/postgresql.sql",
        "AND coalesce(inbox.payload_hash = m.payload_hash, true) THEN 'finished'",
        "THEN 'finished'",
        model=_ONE_MESSAGE,
        machine=_ONE_AT_A_TIME,
        tests=pytest_of(
            "store/test_inbox_claims.py::test_another_payload_is_set_aside_whatever_the_row", only=_PG
        ),
        sweep=_ONE_TOPIC,
        chaos=_CHAOS,
    ),
    Mutant(
        "rollback-answers-commit",
        "A COMMIT that the server answers with ROLLBACK counts as done.",
        "connections/base.py",
        'if answer is not None and answer != "COMMIT":',
        'if answer == "":',
        model=Defect("inbox", "NO_CLOSE"),
        machine=_HONEST,
        tests=pytest_of(
            "connections/test_base_conformance.py::test_commit_of_a_failed_transaction_is_refused",
            only="psycopg",
        ),
        sweep=_HONEST,
        chaos="the statement before COMMIT meets such a transaction first",
    ),
    Mutant(
        "lock-timeout-leaks",
        "A handler waits for locks no longer than txbox would for the claim of its message.",
        "store/postgresql.sql",
        "RETURNING message_id, set_config('lock_timeout', current_setting('txbox.lock_timeout'), true)",
        "RETURNING message_id",
        model=_ONE_MESSAGE,
        machine=_ONE_BY_ONE,
        tests=pytest_of(
            "processing/test_transaction.py::test_lock_timeout_is_restored_before_the_handler_runs", only=_PG
        ),
        sweep=_ONE_WORKER,
        chaos=_COSTS_TIME,
    ),
    Mutant(
        "frozen-keeps-its-rows",
        "A process that stands still keeps the rows of its open transaction, however long that lasts.",
        "store/postgresql.sql",
        "|| set_config('idle_in_transaction_session_timeout', :idle_ms::text, true) IS NOT NULL",
        "IS NOT NULL",
        model="whoever holds a row there is killed, or goes on",
        machine=_ONE_BY_ONE,
        tests=pytest_of("connections/test_psycopg_pipelined.py::test_a_handler_that_hangs_is_cut_off_by_the_server"),
        sweep=_ONE_WORKER,
        chaos=_COSTS_TIME,
    ),
    Mutant(
        "commit-cancelled",
        "A caller that is cancelled gives up a COMMIT that is on its way, and its connection with it.",
        "session.py",
        "return await (_shielded(commit) if self.is_async else commit)",
        "return await commit",
        model=_ONE_MESSAGE,
        machine=_ONE_BY_ONE,
        tests=pytest_of(
            "test_session.py::test_a_commit_that_was_sent_is_awaited_however_often_its_caller_is_cancelled"
        ),
        sweep=_KILLED,
        chaos=_NOT_THERE,
    ),
)  # fmt: skip

# -- failures, dead letters and the operator --------------------------------------------------------

_FAILURES = (
    Mutant(
        "unconditional-failure",
        "A failure is recorded over whatever has become of the message meanwhile.",
        "store/common.sql",
        "AND ((status = 'processing' AND token = :token::text)",
        "AND (true OR (status = 'processing' AND token = :token::text)",
        model=Defect("inbox", "UNCONDITIONAL_FAILURE"),
        machine=_ONE_BY_ONE,
        tests=pytest_of(
            "processing/test_failure_recording.py::test_record_never_overwrites_a_processed_row", only=_LITE
        ),
        sweep=_ONE_WORKER,
        chaos=_CHAOS_LONG,
    ),
    Mutant(
        "late-failure-over-a-retry",
        "A failure that comes late is recorded over an operator's retry of the same message.",
        "store/common.sql",
        "AND attempts = (SELECT count(*) FROM txbox_attempt AS past",
        "AND attempts <= (SELECT count(*) FROM txbox_attempt AS past",
        model=_NO_OPERATOR,
        machine=_ONE_BY_ONE,
        tests=pytest_of(
            "processing/test_failure_recording.py::"
            "test_a_late_delivery_leaves_an_edited_row_alone_that_has_failed_again",
            only=_LITE,
        ),
        sweep=_ONE_WORKER,
        chaos=_COSTS_TIME,
    ),
    Mutant(
        "attempt-outside-the-transaction",
        "A failure is counted in one commit and gets its line in the history by another.",
        "store/inbox.py",
        "await db.commit((attempt, *self.commit_bounded()), goes_on=True)",
        "await db.commit(self.commit_bounded(), goes_on=True)\n            await db.together((attempt,))",
        model=_NO_BUDGETS,
        machine="no process dies there while it records a failure",
        tests=pytest_of(
            "processing/test_transaction_commits.py::test_ambiguous_commit_of_a_recorded_failure",
            only=f"{_PG} and after",
        ),
        sweep=sweep("retried", _LITE),
        chaos=_CHAOS,
    ),
    Mutant(
        "lost-commit-is-an-attempt",
        "A COMMIT whose answer was lost counts as one that the server has refused.",
        "processing/transaction.py",
        "return End.REFUSED if answered else End.AMBIGUOUS",
        "return End.REFUSED",
        model=_NO_BUDGETS,
        machine=_NO_NETWORK,
        tests=pytest_of(
            "processing/test_transaction_commits.py::test_ambiguous_commit_of_a_delivery", only=_PG
        ),
        sweep=_KILLED,
        chaos=_CHAOS,
    ),
    Mutant(
        "refused-commit-is-no-attempt",
        "A COMMIT that the server refuses is tried again without end.",
        "processing/transaction.py",
        "return End.REFUSED if answered else End.AMBIGUOUS",
        "return End.AMBIGUOUS",
        model=_NO_BUDGETS,
        machine=_HONEST,
        tests=pytest_of(
            "processing/test_transaction_refused_commits.py::test_poison_at_commit_is_dead_after_its_attempts",
            only="inline",
            limit_s=120,
        ),
        sweep=_NO_POISON,
        chaos=_DEFINITE,
    ),
    Mutant(
        "outage-is-an-attempt",
        "A connection that is lost under a handler costs its message an attempt.",
        "processing/transaction.py",
        "_answered(raised.database_error)):\n        return End.LOST",
        "_answered(raised.database_error)):\n        return End.RAISED",
        model=_NO_BUDGETS,
        machine=_NO_NETWORK,
        tests=pytest_of("processing/test_failure.py::test_connection_lost_in_the_handler_is_no_attempt"),
        sweep=_KILLED,
        chaos=_CHAOS,
    ),
    Mutant(
        "attempts-beyond-the-last",
        "A message is tried once more than it may be.",
        "store/common.sql",
        "attempts + 1 >= :max_attempts::integer",
        "attempts >= :max_attempts::integer",
        model=_NO_BUDGETS,
        machine=machine(_LITE),
        tests=pytest_of("scenarios/test_failures.py::test_retry_cap_and_dead_lettering", only=_LITE),
        sweep=_NO_POISON,
        chaos=_CHAOS,
    ),
    Mutant(
        "endless-retry-date",
        "A handler may put its next attempt off beyond what a database can say.",
        "processing/failure.py",
        "isinstance(after, timedelta) and abs(after) <= LONGEST",
        "isinstance(after, timedelta)",
        model=_NO_BUDGETS,
        machine=_HONEST,
        tests=pytest_of("test_identity_fields.py::test_a_retry_that_waits_too_long_costs_an_attempt", only=_PG),
        sweep=_NO_POISON,
        chaos=_NOT_THERE,
    ),
    Mutant(
        "letter-outside-the-transaction",
        "A dead letter is staged behind the commit that makes its message dead.",
        "store/inbox.py",
        "await db.execute(attempt)\n            await dying(db, attempts)\n",
        "await db.execute(attempt)\n            await db.commit()\n            await db.begin()\n"
        "            await dying(db, attempts)\n",
        model=Defect("inbox", "LETTER_AFTER_ACK"),
        machine=_NO_OUTBOX,
        tests=pytest_of(
            "outbox/test_dead_letters.py::test_no_message_is_dead_without_its_letter_wherever_a_process_dies"
        ),
        sweep=_NO_POISON,
        chaos=_NOT_THERE,
    ),
    Mutant(
        "accepted-stays-in-quarantine",
        "What an operator accepts can be accepted again, under one more id.",
        "admin/changes.py",
        "await db.execute(ended)",
        "_ = ended",
        model=_NO_OPERATOR,
        machine=machine(_LITE),
        tests=pytest_of(
            "admin/test_admin_quarantine.py::test_an_id_of_its_own_is_needed_where_there_is_none_or_another_has_it",
            only=_LITE,
        ),
        sweep="no operator there",
        chaos="its operator gives what he accepts one id, which is then a known one",
    ),
    Mutant(
        "retention-inside-the-replays",
        "Pruning takes what is finished, however young it is.",
        "store/postgresql.sql",
        "AND processed_at < now() - make_interval(secs => :older_than_s::double precision)",
        "AND processed_at < now()",
        model=Defect("inbox", "RETENTION"),
        machine=_PRUNES_ALL,
        tests=pytest_of(
            "maintenance/test_maintenance.py::test_prune_deletes_finished_rows_past_the_horizon_with_their_attempts",
            only=_PG,
        ),
        sweep=_NEVER_PRUNED,
        chaos=_CHAOS,
    ),
    Mutant(
        "prune-unfinished",
        "Pruning takes dead and failed messages, too, once they are old.",
        "store/postgresql.sql",
        "AND status IN ('processed', 'discarded')\n          AND processed_at < now()",
        "AND status <> 'processing'\n          AND coalesce(processed_at, received_at) < now()",
        model=_NO_OPERATOR,
        machine=machine(_PG),
        tests=pytest_of(
            "maintenance/test_maintenance.py::test_prune_never_touches_what_is_not_finished", only=_PG
        ),
        sweep=_NEVER_PRUNED,
        chaos=_NOT_OLD,
    ),
    Mutant(
        "prune-undecided",
        "What nobody has decided on is deleted from the quarantine once it is old.",
        "store/common.sql",
        "status <> 'quarantined' AND updated_at < [ago :older_than_s]",
        "updated_at < [ago :older_than_s]",
        model=_NO_OPERATOR,
        machine="it prunes no quarantine",
        tests=pytest_of(
            "admin/test_admin_quarantine.py::test_what_is_discarded_loses_its_payload_and_later_its_row",
            only=_LITE,
        ),
        sweep=_NEVER_PRUNED,
        chaos=_NOT_OLD,
    ),
    Mutant(
        "two-runners",
        "A maintenance job is given to whoever asks, also while another has it.",
        "store/common.sql",
        "AND (lease_until IS NULL OR lease_until <= [now] OR token = :token::text)",
        "AND :token::text <> ''",
        model=_NO_OPERATOR,
        machine=_ONE_BY_ONE,
        tests=pytest_of("maintenance/test_maintenance.py::test_one_runner_holds_the_lease_of_a_job", only=_LITE),
        sweep=_ONE_WORKER,
        chaos=_COSTS_TIME,
    ),
)  # fmt: skip

# -- leases and order -------------------------------------------------------------------------------

_LEASES = (
    Mutant(
        "no-fence",
        "A worker whose lease was given to another commits all the same.",
        "store/postgresql.sql",
        "AND inbox.token = :lease::text AND inbox.status = 'processing'",
        "AND inbox.status <> 'pending'",
        model=Defect("inbox", "NO_FENCE"),
        machine=_ONE_BY_ONE,
        tests=pytest_of("processing/test_transaction.py::test_zombie_can_run_but_cannot_commit", only=_PG),
        sweep=_ONE_WORKER,
        chaos=_CHAOS,
    ),
    Mutant(
        "release-without-fence",
        "A row is given back by whoever had it once, whatever has become of it.",
        "store/common.sql",
        "AND token = :token::text AND status = 'processing'",
        "AND :token::text <> ''",
        model=Defect("inbox", "RELEASE_WITHOUT_FENCE"),
        machine=_NO_LEASE_ENDS,
        tests=pytest_of(
            "processing/test_transaction_commits.py::test_ambiguous_commit_of_leased_work",
            only=f"{_PG} and after",
        ),
        sweep=_KILLED,
        chaos=_CHAOS,
    ),
    Mutant(
        "heartbeat-without-token",
        "A worker extends a lease that is another's by now.",
        "store/postgresql.sql",
        "AND token = :token::text AND status = 'processing'",
        "AND status = 'processing'",
        model=_ANY_TIME,
        machine=_NO_LEASE_ENDS,
        tests=pytest_of("store/test_leases.py::test_heartbeat_keeps_a_lease_from_rescue", only=_PG),
        sweep=_ONE_WORKER,
        chaos=_COSTS_TIME,
    ),
    Mutant(
        "start-not-given-back",
        "A run that ended for a reason of ours counts as one that killed its process.",
        "store/common.sql",
        "starts = [greatest](starts - 1, 0), lease_until = NULL",
        "lease_until = NULL",
        model=_NO_BUDGETS,
        machine=_NO_LEASE_ENDS,
        tests=pytest_of("store/test_leases.py::test_infrastructure_release_gives_the_start_back", only=_LITE),
        sweep=_ONE_WORKER,
        chaos=_ANY_STARTS,
    ),
    Mutant(
        "start-not-counted",
        "A message that kills its process is started again and again.",
        "store/postgresql.sql",
        "starts = inbox.starts + 1",
        "starts = inbox.starts",
        model=_NO_BUDGETS,
        machine=machine(_PG),
        tests=pytest_of(
            "scenarios/test_crashes.py::test_message_that_kills_its_process_runs_out_of_starts", only=_PG
        ),
        sweep=_NO_KILLER,
        chaos=_ANY_STARTS,
    ),
    Mutant(
        "redelivery-inline",
        "A redelivery that may have killed its worker is run without being counted first.",
        "worker/lane.py",
        "self.redelivered = Mode.STORED if stored or options.in_order else Mode.LEASED",
        "self.redelivered = self.once",
        model=_NO_BUDGETS,
        machine=_NO_SOURCE,
        tests=pytest_of("worker/test_lane_leased.py::test_a_redelivery_is_counted_before_it_runs", only=_LITE),
        sweep=_NO_KILLER,
        chaos=_ANY_STARTS,
    ),
    Mutant(
        "rescue-takes-the-living",
        "Rows are taken from workers whose leases have not expired.",
        "store/postgresql.sql",
        "WHERE status = 'processing' AND lease_until <= clock_timestamp()",
        "WHERE status = 'processing'",
        model=_ANY_TIME,
        machine=_NO_LEASE_ENDS,
        tests=pytest_of("store/test_leases.py::test_heartbeat_keeps_a_lease_from_rescue", only=_PG),
        sweep=_ONE_WORKER,
        chaos=_COSTS_TIME,
    ),
    Mutant(
        "lease-ignores-order",
        "Of a key with a row that has to wait, the rows behind it are leased.",
        "store/postgresql.sql",
        "THEN [is_head] END",
        "THEN true END",
        model=_NO_KEYS,
        machine=_ONE_AT_A_TIME,
        tests=pytest_of(
            "store/test_order.py::test_a_dead_head_blocks_its_key_until_somebody_acts", only=_PG
        ),
        sweep=_ONE_TOPIC,
        chaos=_CHAOS,
    ),
    Mutant(
        "successor-before-predecessor",
        "A version does not wait for the one before it.",
        "store/order.py",
        "return self.gap(sequence, gaps) and (self.earlier_unfinished or not self.overdue)",
        "return False",
        model=_NO_KEYS,
        machine=_ONE_AT_A_TIME,
        tests=pytest_of("store/test_order_sequence.py::test_out_of_order_events", only=_LITE),
        sweep=_ONE_TOPIC,
        chaos=_CHAOS,
    ),
    Mutant(
        "late-version-sets-back",
        "A version that comes late sets its key back to where it was.",
        "store/common.sql",
        "last = [greatest](txbox_sequence.last, [new last])",
        "last = [new last]",
        model=_NO_KEYS,
        machine=_ONE_AT_A_TIME,
        tests=pytest_of(
            "store/test_order_sequence.py::test_a_missing_version_is_waited_for_no_longer_than_the_policy_says",
            only=_LITE,
        ),
        sweep=_ONE_TOPIC,
        chaos="no version is missing there for as long as it may be",
    ),
    Mutant(
        "held-key-goes-on",
        "A message that another transaction holds does not hold those of its key behind it.",
        "worker/lane.py",
        "self._behind.setdefault(key, deque())",
        "_ = self._behind",
        model=_NO_KEYS,
        machine=_ONE_AT_A_TIME,
        tests=pytest_of("store/test_order.py::test_a_message_in_progress_elsewhere_holds_its_key", only=_PG),
        sweep=_ONE_TOPIC,
        chaos="its ordered messages come from the outbox, and are rows from the start",
    ),
    Mutant(
        "batch-passes-its-culprit",
        "A batch that is divided goes on with a key of which one message is not settled.",
        "processing/attempt.py",
        "if handler.options.in_order and arrival.message.key in keys:",
        "if handler.options.in_order and not arrival.message_id:",
        model=_NO_KEYS,
        machine=_ONE_AT_A_TIME,
        tests=pytest_of("store/test_order_held_keys.py::test_a_head_that_another_process_has_holds_its_key_in_a_batch"),
        sweep=_ONE_TOPIC,
        chaos="its ordered messages come from the outbox, and are rows from the start",
    ),
    Mutant(
        "order-not-asked",
        "A message of an ordered consumer is run although one before it waits in the table.",
        "processing/transaction.py",
        "if handler.in_order and not claim.replay:",
        "if handler.in_order and claim.replay:",
        model=_NO_KEYS,
        machine=_ONE_AT_A_TIME,
        tests=pytest_of(
            "store/test_order.py::test_what_comes_behind_a_failed_message_waits_in_the_table", only=_LITE
        ),
        sweep=_ONE_TOPIC,
        chaos=_CHAOS,
    ),
)  # fmt: skip

# -- outbox and relay -------------------------------------------------------------------------------

_RELAY = (
    Mutant(
        "relay-beyond-the-last",
        "A relay never looks before the last row it has seen, where a transaction may still commit one.",
        "store/outbox.py",
        "if not leased_page.more:\n                self._after = _START",
        'if not leased_page.more:\n                self._back_at = float("inf")',
        model=Defect("relay", "BEYOND_THE_LAST"),
        machine=_NO_OUTBOX,
        tests=pytest_of("worker/test_relay.py::test_a_row_that_commits_late_is_not_skipped", only=_PG),
        sweep=_NO_OUTBOX,
        chaos=_CHAOS,
    ),
    Mutant(
        "mark-before-publish",
        "Rows are marked as sent before they are published.",
        "worker/relay.py",
        "reachable = True\n        for part in",
        "reachable = True\n        self._record(rows, [], [], token, started)\n        for part in",
        model=Defect("relay", "MARK_FIRST"),
        machine=_NO_OUTBOX,
        tests=pytest_of("worker/test_relay_killed.py::test_relay_republishes"),
        sweep=_NO_OUTBOX,
        chaos=_CHAOS,
    ),
    Mutant(
        "mark-unconfirmed",
        "Rows are marked as sent whose publisher has said that they were not.",
        "worker/relay.py",
        "if answer is None:\n                    confirmed.append(row)",
        "if not isinstance(answer, NotTried):\n                    confirmed.append(row)",
        model=Defect("relay", "MARK_UNCONFIRMED"),
        machine=_NO_OUTBOX,
        tests=pytest_of("worker/test_relay.py::test_a_failed_message_holds_up_its_own_key_only", only=_LITE),
        sweep=_NO_OUTBOX,
        chaos=chaos(_LITE, "kafka", minutes=2),
    ),
    Mutant(
        "relay-new-id",
        "A row that is published again goes out under another id.",
        "worker/relay.py",
        "if route.cloudevents is None or publisher is None:\n            return row.message",
        "if route.cloudevents is None or publisher is None:\n"
        '            return __import__("dataclasses").replace(row.message, id=secrets.token_hex(16))',
        model=Defect("relay", "NEW_ID"),
        machine=_NO_OUTBOX,
        tests=pytest_of("worker/test_relay.py::test_what_was_committed_leaves_once_under_its_id", only=_LITE),
        sweep=_NO_OUTBOX,
        chaos=_CHAOS_LONG,
    ),
    Mutant(
        "relay-passes-a-failed-row",
        "Rows of a key are published although one before them was not.",
        "worker/relay.py",
        "return [row for row in rows if row.id not in behind]",
        "return rows",
        model=_NO_KEYS,
        machine=_NO_OUTBOX,
        tests=pytest_of("worker/test_relay.py::test_a_failed_message_holds_up_its_own_key_only", only=_LITE),
        sweep=_NO_OUTBOX,
        chaos="its second App books in any order",
    ),
    Mutant(
        "publish-unroutable",
        "RabbitMQ confirms a message that it has put into no queue.",
        "brokers/rabbitmq/publisher.py",
        "mandatory=True, wait=False,",
        "mandatory=False, wait=False,",
        model=_NO_ROUTES,
        machine=_NO_OUTBOX,
        tests=pytest_of("brokers/test_rabbitmq_publisher.py", only="takes_nothing"),
        sweep=_NO_OUTBOX,
        chaos=chaos(_LITE, "rabbitmq", minutes=4),
    ),
    Mutant(
        "stage-without-lock",
        "Two transactions that stage under one key in order get numbers in another order than they commit.",
        "outbox/__init__.py",
        'if locks and dialect.has("stage_lock"):',
        'if locks and not dialect.has("stage"):',
        model=_NO_KEYS,
        machine=_NO_OUTBOX,
        tests=pytest_of(
            "outbox/test_outbox.py::test_who_stages_in_order_waits_for_whoever_has_staged_under_the_key", only=_PG
        ),
        sweep=_NO_OUTBOX,
        chaos="its handlers lock a row of the key before they stage",
    ),
    Mutant(
        "relay-takes-what-is-leased",
        "A relay that has seen a row takes it, although another has leased it since.",
        "store/postgresql.sql",
        "AND available_at <= now()\n                AND route IN (:route::text, '')",
        "AND route IN (:route::text, '')",
        model=_ATOMIC_LEASE,
        machine=_NO_OUTBOX,
        tests=pytest_of(
            "worker/test_relay.py::test_relays_side_by_side_never_send_one_row_twice_and_keep_each_keys_order",
            only=_PG,
        ),
        sweep=_NO_OUTBOX,
        chaos=_ONE_RELAY,
    ),
    Mutant(
        "route-ignored",
        "A staged row does not keep its route, so that any App takes it that knows its topic.",
        "outbox/__init__.py",
        '"route": route,',
        '"route": "",',
        model=Defect("relay", "ROUTE_IGNORED"),
        machine=_NO_OUTBOX,
        tests=pytest_of("worker/test_relay_apps.py::test_an_app_leaves_the_rows_of_another_alone", only=_LITE),
        sweep=_NO_OUTBOX,
        chaos="its two Apps have no topic in common that both publish or consume locally",
    ),
    Mutant(
        "star-takes-effects",
        'A handler of "*" gets the effects of others.',
        "handlers/__init__.py",
        '(self.topic == "*" and not topic.startswith(EFFECT_PREFIX))',
        'self.topic == "*"',
        model=_NO_ROUTES,
        machine=_NO_OUTBOX,
        tests=pytest_of("outbox/test_effects.py::test_a_handler_of_every_topic_takes_no_effects", only=_LITE),
        sweep=_ONE_TOPIC,
        chaos=_NOT_THERE,
    ),
    Mutant(
        "staged-runs-effects",
        "A reply whose topic a stranger has named may run an effect.",
        "outbox/routes.py",
        "if topic.startswith(EFFECT_PREFIX):",
        "if not topic:",
        model=_NO_ROUTES,
        machine=_NO_OUTBOX,
        tests=pytest_of("outbox/test_routes.py::test_nothing_that_is_staged_runs_an_effect"),
        sweep=_NO_OUTBOX,
        chaos=_NOT_THERE,
    ),
)  # fmt: skip

MUTANTS = {
    mutant.name: mutant for mutant in (*_ACKNOWLEDGED, *_TRANSACTION, *_FAILURES, *_LEASES, *_RELAY)
}
