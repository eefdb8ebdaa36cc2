import pytest
import torch

from tests import harness

torch.set_num_threads(1)  # tensors are small here: more threads wait for each other


@pytest.fixture
def fresh_workers() -> None:
    """Workers whose memory no earlier case has used: a freed heap would hide what is measured."""
    harness.close()


def pytest_sessionfinish() -> None:
    harness.close()
