"""The inbox and the outbox as models to view and to filter. Nothing is changed through them: verbs do that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from django.db import models

if TYPE_CHECKING:
    _TextField = models.TextField[Any, Any]
    _BigInteger = models.BigIntegerField[Any, Any]
    _Integer = models.IntegerField[Any, Any]
    _Time = models.DateTimeField[Any, Any]
else:
    _TextField, _Time = models.TextField, models.DateTimeField
    _BigInteger, _Integer = models.BigIntegerField, models.IntegerField


class _Text(_TextField):
    """Text that MySQL keeps as bytes, so that it compares them."""

    def from_db_value(self, value: Any, *_: object) -> str | None:
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise TypeError(
        "The tables of txbox are changed by its verbs: txbox.admin.Admin, or `manage.py txbox`."
    )


class _Rows(models.QuerySet[Any]):
    create = get_or_create = update_or_create = update = delete = _refuse
    bulk_create = bulk_update = _raw_delete = _refuse


class _ReadOnly(models.Model):
    objects = _Rows.as_manager()

    class Meta:
        abstract = True

    save = delete = _refuse


class InboxMessage(_ReadOnly):
    """A message of one consumer. Its payload and error are shown by `Admin.show`, which knows codec and redaction."""

    arrival = _BigInteger(primary_key=True)
    consumer = _Text()
    message_id = _Text()
    status = _Text()
    topic = _Text()
    type = _Text(null=True)
    key = _Text(null=True)
    attempts = _Integer()
    received_at = _Time()
    updated_at = _Time()
    processed_at = _Time(null=True)
    next_attempt_at = _Time(null=True)
    error_type = _Text(null=True)

    class Meta(_ReadOnly.Meta):
        managed = False
        db_table = "txbox_inbox"
        verbose_name = "message of the inbox"
        verbose_name_plural = "inbox"
        default_permissions = ("view", "change")

    def __str__(self) -> str:
        return f"{self.consumer} {self.message_id}"


class OutgoingMessage(_ReadOnly):
    """A message of the outbox that has not been sent, or is kept."""

    number = _BigInteger(primary_key=True)
    message_id = _Text(db_column="id")
    status = _Text()
    topic = _Text()
    type = _Text(null=True)
    key = _Text(null=True)
    attempts = _Integer()
    staged_at = _Time()
    available_at = _Time()
    sent_at = _Time(null=True)
    error_type = _Text(null=True)

    class Meta(_ReadOnly.Meta):
        managed = False
        db_table = "txbox_outbox"
        verbose_name = "outgoing message"
        verbose_name_plural = "outbox"
        default_permissions = ("view", "change")

    def __str__(self) -> str:
        return str(self.message_id)
