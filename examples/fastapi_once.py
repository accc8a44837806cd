"""FastAPI: a payment once for each Idempotency-Key, however often the client sends it.

    pip install fastapi uvicorn "txbox[postgresql]"
    export TXBOX_DATABASE_URL=postgresql://localhost/shop
    txbox init
    psql $TXBOX_DATABASE_URL -c 'CREATE TABLE payment (account text, amount int)'
    uvicorn fastapi_once:api

    curl -X POST 'localhost:8000/payments?amount=30' -H 'Authorization: Bearer ann-secret' -H 'Idempotency-Key: k-1'

Send the last line twice: one payment, and the same answer. `txbox list --consumer pay` shows the key.
"""

from __future__ import annotations

import os
from typing import Annotated

import psycopg
from fastapi import Depends, FastAPI, HTTPException
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from txbox import App, Inbox
from txbox.integrations.starlette import Answers, once

app = App(os.environ.get("TXBOX_DATABASE_URL", "postgresql://localhost/shop"))
USERS = {"ann-secret": "ann", "bob-secret": "bob"}


def user(token: Annotated[HTTPAuthorizationCredentials, Depends(HTTPBearer())]) -> str:
    if token.credentials not in USERS:
        raise HTTPException(401)
    return USERS[token.credentials]


User = Annotated[str, Depends(user)]
Tx = Annotated[psycopg.Connection, once(Inbox("pay"), app.transaction, caller=user)]

api = FastAPI()
api.add_middleware(Answers)


@api.post("/payments", status_code=201)
def pay(amount: int, name: User, tx: Tx) -> dict[str, int | str]:
    """Committed with its answer, before that is sent; an exception leaves neither."""
    tx.execute("INSERT INTO payment VALUES (%s, %s)", (name, amount))
    if amount > 1000:
        raise HTTPException(402, "too much for one payment")
    return {"account": name, "amount": amount}
