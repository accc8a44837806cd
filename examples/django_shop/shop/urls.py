from typing import Any

from django.contrib import admin
from django.db import connection
from django.http import HttpResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from shop.messages import app
from shop.models import Order


@csrf_exempt
def order(request: Any, number: str) -> HttpResponse:
    """ATOMIC_REQUESTS: the order and its message are one commit, or the exception's rollback takes both."""
    Order.objects.create(number=int(number))
    app.outbox.stage(connection, "orders", {"number": int(number)})
    if int(number) < 0:
        raise ValueError("no such number")
    return HttpResponse("taken", status=201)


urlpatterns = [path("admin/", admin.site.urls), path("orders/<str:number>", order)]
