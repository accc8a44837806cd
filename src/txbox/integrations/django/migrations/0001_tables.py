from typing import Any

from django.db import migrations, models

from txbox.integrations.django.operations import Tables

_UNMANAGED: dict[str, Any] = {"managed": False, "default_permissions": ("view", "change")}


class Migration(migrations.Migration):
    """Version 1 of the tables, unless they are there: `txbox init` may have been first."""

    initial = True
    operations = [  # noqa: RUF012
        Tables(1),
        migrations.CreateModel(
            "InboxMessage",
            fields=[("arrival", models.BigIntegerField(primary_key=True, serialize=False))],
            options={
                **_UNMANAGED,
                "db_table": "txbox_inbox",
                "verbose_name": "message of the inbox",
                "verbose_name_plural": "inbox",
            },
        ),
        migrations.CreateModel(
            "OutgoingMessage",
            fields=[("number", models.BigIntegerField(primary_key=True, serialize=False))],
            options={
                **_UNMANAGED,
                "db_table": "txbox_outbox",
                "verbose_name": "outgoing message",
                "verbose_name_plural": "outbox",
            },
        ),
    ]
