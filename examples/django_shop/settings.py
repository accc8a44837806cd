import os

# PGPORT, PGUSER and PGPASSWORD are read by the driver itself
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "HOST": os.environ.get("PGHOST", "localhost"),
        "NAME": os.environ.get("PGDATABASE", "shop"),
        "ATOMIC_REQUESTS": True,
    }
}
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "txbox.integrations.django",
    "shop",
]
TXBOX_APP = "shop.messages:app"
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ROOT_URLCONF = "shop.urls"
SECRET_KEY = os.environ.get("SHOP_SECRET", "only for the example")
ALLOWED_HOSTS = ["localhost", "127.0.0.1", "testserver"]
STATIC_URL = "static/"
USE_TZ = True
