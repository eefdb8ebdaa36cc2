from tests import harness


def pytest_sessionfinish() -> None:
    harness.close()
