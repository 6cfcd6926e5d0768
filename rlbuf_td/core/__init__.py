"""The core as it will be, built beside the one in use, see ``.github/CORE.md``. So far only tests import this room."""
