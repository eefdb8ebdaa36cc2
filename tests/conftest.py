import pytest

from tests import harness


@pytest.fixture
def fresh_workers() -> None:
    """Workers whose memory no earlier case has used: a freed heap would hide what is measured."""
    harness.close()


def pytest_sessionfinish() -> None:
    harness.close()
