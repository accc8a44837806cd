"""Django with txbox: migrations, the admin with its verbs, a view that stages, a signal for dead letters.

pip install "txbox[django,postgresql]"
createdb shop                       # settings.py: PGHOST, PGUSER and PGPASSWORD say where
python manage.py migrate
python manage.py createsuperuser
python manage.py txbox run          # worker and relay
python manage.py runserver          # POST /orders/7, and /admin
"""

import os
import sys

from django.core.management import execute_from_command_line

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "settings")
    execute_from_command_line(sys.argv)
