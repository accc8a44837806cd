"""Django's admin: look at messages, and retry or discard them through `txbox.admin.Admin`, with the user as actor.

Who has the permission `view` looks; who has `change` may use the verbs. Nobody adds, edits or deletes rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from django.contrib import admin, messages
from django.db import transaction
from django.http import HttpRequest, HttpResponse

from txbox.admin import Admin, InboxFilter, OutboxFilter
from txbox.errors import TxboxError
from txbox.integrations import django as integration
from txbox.integrations.django.models import InboxMessage, OutgoingMessage

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Any]
else:
    _ModelAdmin = admin.ModelAdmin


class _Verbs(_ModelAdmin):
    show_full_result_count = False
    list_per_page = 50
    actions = ("retry", "discard")

    def has_add_permission(self, request: HttpRequest) -> bool:  # noqa: ARG002
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:  # noqa: ARG002
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:  # noqa: ARG002
        return False

    def has_verbs_permission(self, request: HttpRequest) -> bool:
        """Asked by the actions: the model's `change`, of which Django's own forms are nobody's here."""
        return super().has_change_permission(request)

    # a verb has transactions of its own, whatever ATOMIC_REQUESTS says
    @transaction.non_atomic_requests
    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        return super().changelist_view(request, extra_context)

    @admin.action(description="Retry: a full new budget of attempts", permissions=["verbs"])
    def retry(self, request: HttpRequest, queryset: Any) -> None:
        self._change("retry", request, queryset)

    @admin.action(description="Discard for good", permissions=["verbs"])
    def discard(self, request: HttpRequest, queryset: Any) -> None:
        self._change("discard", request, queryset)

    def _change(
        self, verb: Literal["retry", "discard"], request: HttpRequest, rows: Iterable[Any]
    ) -> None:
        operator, count = Admin(integration.app()), 0
        left: list[str] = []
        change = getattr(operator, verb)
        for row in list(rows):
            try:
                changed = change(
                    self.filter_of(row), actor=request.user.get_username(), reason="Django admin"
                )
            except TxboxError as error:
                self.message_user(request, f"{row}: {error}", messages.ERROR)
                continue
            count += changed.count
            if not changed.count:
                left.append(f"{row}: {operator.why_not(verb, self.filter_of(row))}")
        for why in left:
            self.message_user(request, why, messages.WARNING)
        self.message_user(request, f"{verb}: {count}", messages.SUCCESS)

    @staticmethod
    def filter_of(row: Any) -> Any:
        raise NotImplementedError

    @admin.display(description="error")
    def error(self, row: Any) -> str:
        """As the operator's view has it: decoded, without what is redacted."""
        found: Any = Admin(integration.app()).show(self.filter_of(row))
        return (found[0].error or "") if found else ""


@admin.register(InboxMessage)
class InboxAdmin(_Verbs):
    list_display = (
        "message_id",
        "consumer",
        "status",
        "topic",
        "type",
        "attempts",
        "error_type",
        "received_at",
    )
    list_filter = ("status", "consumer")
    search_fields = ("=message_id",)
    ordering = ("-arrival",)
    readonly_fields = ("error",)

    @staticmethod
    def filter_of(row: Any) -> InboxFilter:
        return InboxFilter(consumer=row.consumer, message_id=row.message_id)


@admin.register(OutgoingMessage)
class OutboxAdmin(_Verbs):
    list_display = ("message_id", "status", "topic", "type", "attempts", "error_type", "staged_at")
    list_filter = ("status", "topic")
    search_fields = ("=message_id",)
    ordering = ("-number",)
    readonly_fields = ("error",)

    @staticmethod
    def filter_of(row: Any) -> OutboxFilter:
        return OutboxFilter(message_id=row.message_id)
