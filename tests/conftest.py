import pytest
import torch

from tests import harness

torch.set_num_threads(1)  # tensors are small here: more threads wait for each other


@pytest.fixture
def fresh_workers() -> None:
    """Workers whose memory no earlier case has used: a freed heap would hide what is measured."""
    harness.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With pytest-xdist's ``--dist loadgroup``, which launch/test.sh asks for: tests that start
    ranks take turns in one process, so that workers are started once; the others go beside."""
    for item in items:
        if item.path.parent.name == "dist":
            item.add_marker(pytest.mark.xdist_group("ranks"))


def pytest_sessionfinish() -> None:
    harness.close()
