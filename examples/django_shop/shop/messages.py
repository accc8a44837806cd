"""The App: what is handled, and what happens when a message is given up."""

from typing import Any

from django.dispatch import receiver

from shop.models import Order
from txbox import App, Message
from txbox.integrations.django import dead_letter

app = App(django="default")


@app.handler("orders", consumer="invoicing", reject_on=[Order.DoesNotExist])
def invoice(message: Message[dict[str, Any]], tx: Any) -> None:
    """Inside `transaction.atomic(durable=True)`: the ORM writes in the message's own transaction."""
    order = Order.objects.get(number=message.body["number"])
    order.invoiced = True
    order.save()


@receiver(dead_letter)
def alert(event: Any, **_: Any) -> None:
    print(f"ALERT {event}")
