"""What several tests of compiled steps ask for."""

import pytest

from gradweave import _logging


@pytest.fixture
def warned(caplog):
    """The warnings of gradweave so far, as if this was the first test of the process."""
    _logging._log_once.cache_clear()
    caplog.set_level("INFO", logger="gradweave")

    def messages():
        records = [record for record in caplog.records if record.name == "gradweave"]
        return [record.message for record in records if record.levelname == "WARNING"]

    return messages
