"""The dashboard: pages and actions over `admin/`, as an ASGI application."""

from txbox.ui.app import Dashboard
from txbox.ui.security import Access, Authenticate, Authenticator, Grant, Token, Users, hashed

__all__ = [
    "Access",
    "Authenticate",
    "Authenticator",
    "Dashboard",
    "Grant",
    "Token",
    "Users",
    "hashed",
]
