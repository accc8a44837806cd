"""A service that takes all its settings from the environment.

pip install 'txbox[settings,postgresql]'
export SHOP_DATABASE_URL=postgresql://localhost/shop SHOP_LEASE__DURATION=PT10M SHOP_FEE=3
python settings_service.py
"""

from pydantic import NonNegativeInt

from txbox import App, Message
from txbox.integrations.settings import Settings


class Shop(Settings, env_prefix="SHOP_"):
    fee: NonNegativeInt = 0


settings = Shop()
app: App = settings.app()


@app.handler("orders", consumer="billing")
def bill(message: Message[int], tx) -> None:
    print("charged", message.body + settings.fee)


if __name__ == "__main__":
    print(settings.database_url, app.lease.duration)
    app.init()
    app.process(Message(id="o-1", topic="orders", payload=b"50"))
