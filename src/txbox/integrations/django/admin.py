"""Django's admin: view messages, and retry or discard them through `txbox.admin.Admin`, with the user as actor.

The permission `view` shows them; `change` adds the verbs. No permission adds, edits or deletes rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

from txbox.admin import Admin, InboxFilter, OutboxFilter, views
from txbox.errors import TxboxError
from txbox.integrations import django as integration
from txbox.integrations.django.models import InboxMessage, OutgoingMessage
from txbox.text import counted

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Any]
else:
    _ModelAdmin = admin.ModelAdmin

# of the messages that are about to be discarded
_SHOWN = 20


class _Verbs(_ModelAdmin):
    show_full_result_count = False
    list_per_page = 50
    actions = ("retry", "discard")
    search_fields = ("=message_id",)
    readonly_fields = ("error",)

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

    @admin.action(description="Retry selected messages", permissions=["verbs"])
    def retry(self, request: HttpRequest, queryset: Any) -> None:
        if count := self._change("retry", request, queryset):
            done = f"{counted(count)} retried, with a new budget of attempts. A running worker takes up what is due."
            self.message_user(request, done, messages.SUCCESS)

    @admin.action(description="Discard selected messages", permissions=["verbs"])
    def discard(self, request: HttpRequest, queryset: Any) -> HttpResponse | None:
        """Ask first: nothing brings a discarded message back."""
        if "confirmed" not in request.POST:
            return self._ask(request, queryset)
        if count := self._change("discard", request, queryset):
            self.message_user(request, f"{counted(count)} discarded.", messages.SUCCESS)
        return None

    def _ask(self, request: HttpRequest, queryset: Any) -> HttpResponse:
        count = queryset.count()
        context = {
            **self.admin_site.each_context(request),
            "title": f"Discard {counted(count)}?",
            "opts": self.opts,
            "rows": queryset[:_SHOWN],
            "more": max(0, count - _SHOWN),
            "checkbox": ACTION_CHECKBOX_NAME,
            "chosen": request.POST.getlist(ACTION_CHECKBOX_NAME),
            "across": request.POST.get("select_across", "0"),
        }
        return TemplateResponse(request, "admin/txbox/discard.html", context)

    def _change(
        self, verb: Literal["retry", "discard"], request: HttpRequest, rows: Iterable[Any]
    ) -> int:
        """Apply a verb row by row, and say of each that stays as it is why; returns how many have changed."""
        operator, count = Admin(integration.app()), 0
        change = getattr(operator, verb)
        # Django capitalises a message: a consumer's name must not be its first word
        undone = f"Not {views.DONE[verb]}"
        for row in list(rows):
            where = self.filter_of(row)
            try:
                changed = change(where, actor=request.user.get_username(), reason="Django admin")
            except TxboxError as error:
                self.message_user(request, f"{undone}: {row}: {error}", messages.ERROR)
                continue
            count += changed.count
            if not changed.count:
                why = operator.why_not(verb, where)
                self.message_user(request, f"{undone}: {why}", messages.WARNING)
        return count

    @staticmethod
    def filter_of(row: Any) -> Any:
        raise NotImplementedError

    @admin.display(description="error")
    def error(self, row: Any) -> str:
        """As the operator's view has it: decoded, without what is redacted."""
        messages: Any = Admin(integration.app()).show(self.filter_of(row))
        return (messages[0].error or "") if messages else ""


@admin.register(InboxMessage)
class InboxAdmin(_Verbs):
    list_display = (
        "message_id", "consumer", "status", "topic", "type", "attempts", "error_type", "received_at",
    )  # fmt: skip
    list_filter = ("status", "consumer")
    ordering = ("-arrival",)

    @staticmethod
    def filter_of(row: Any) -> InboxFilter:
        return InboxFilter(consumer=row.consumer, message_id=row.message_id)


@admin.register(OutgoingMessage)
class OutboxAdmin(_Verbs):
    list_display = ("message_id", "status", "topic", "type", "attempts", "error_type", "staged_at")
    list_filter = ("status", "topic")
    ordering = ("-number",)

    @staticmethod
    def filter_of(row: Any) -> OutboxFilter:
        return OutboxFilter(message_id=row.message_id)
