"""An App from environment variables, by pydantic-settings: `app = Settings().app()`.

| variable | of App |
|---|---|
| TXBOX_DATABASE_URL | `database`, as the command line takes it |
| TXBOX_DATABASE_SCHEMA, TXBOX_NOTIFY, TXBOX_UNMATCHED | `schema`, `notify`, `unmatched` |
| TXBOX_LIMITS__…, TXBOX_LEASE__…, TXBOX_RETENTION__…, TXBOX_BATCHING__…, TXBOX_RELAYING__… | a field of that policy |
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from txbox.app import App
from txbox.policy import Batching, Lease, Limits, RelayPolicy, Retention

_OPTIONS = ("notify", "unmatched", "limits", "lease", "retention", "batching", "relaying")


class Settings(BaseSettings):
    """What an App can be told from outside. Subclass it for a prefix or settings of your own.

    Durations are `HH:MM:SS` or ISO 8601 (`PT5M`, `P30D`); a policy may also be one JSON object. The URL, which may have
    a password, is masked in what is printed.

    Raises:
        pydantic.ValidationError: a variable is missing, or is not of its type.
        ConfigurationError: a policy's value is out of range.
    """

    model_config = SettingsConfigDict(
        env_prefix="TXBOX_",
        env_nested_delimiter="__",
        # a .env file has variables of the command line and of other programs
        dotenv_filtering="only_existing",
        hide_input_in_errors=True,
    )

    database_url: SecretStr
    database_schema: str | None = None
    notify: bool = False
    unmatched: Literal["acknowledge", "quarantine"] = "acknowledge"
    limits: Limits | None = None
    lease: Lease | None = None
    retention: Retention | None = None
    batching: Batching | None = None
    relaying: RelayPolicy | None = None

    def app(self, **options: Any) -> App:
        """Make the App; options of its constructor add to these settings, and go before them."""
        values: dict[str, Any] = {name: getattr(self, name) for name in _OPTIONS}
        values["schema"] = self.database_schema
        return App(self.database_url.get_secret_value(), **values | options)
