"""A function on ranks: its result comes back whole, its failure is said once, nothing is left."""

from __future__ import annotations

import signal
import sys

import pytest

from ds4d.config.types import ParallelConfig
from ds4d.launch.call import call_on_ranks
from tests.dist import called
from tests.dist.test_launch import ROOT, finish, left_over, start, wait_for

TWO = ParallelConfig(tp=2)
ODD = "two\nlines, \"quotes\", 'single', ümlaut, \udc80, --tp, $HOME, \x1b"
WAIT = """
import sys
from pathlib import Path
from ds4d.config.types import ParallelConfig
from ds4d.launch.call import call_on_ranks
from tests.dist import called
call_on_ranks(called.wait, Path(sys.argv[1]), parallel=ParallelConfig(tp=2), device="cpu")
"""


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    """Ranks find the tests; folders of calls are in ``tmp_path``."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_the_result_of_rank_0_and_nothing_on_stdout(capfd, tmp_path):
    found = call_on_ranks(
        called.echo, ODD, tmp_path, parallel=TWO, device="cpu", more=[None, 1.5]
    )
    assert found == (0, 2, (ODD, tmp_path), {"more": [None, 1.5]})
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "function, code, said",
    [(called.refuse, 2, "ds4d: corpus.txt is empty"), (called.stumble, 1, "rank 1 of 2")],
)
def test_a_failure_is_said_once_and_the_logs_stay(capfd, tmp_path, function, code, said):
    with pytest.raises(SystemExit) as ended:
        call_on_ranks(function, parallel=TWO, device="cpu")
    out, err = capfd.readouterr()
    assert (ended.value.code, out) == (code, "")
    assert err.count(said) == 1 and err.count("Traceback") == (code == 1)
    (folder,) = tmp_path.iterdir()
    assert f"logs of all ranks are in {folder}/logs" in err
    assert not left_over(tmp_path)


def test_ctrl_c_ends_all(tmp_path):
    job = start([sys.executable, "-c", WAIT, str(tmp_path)], TMPDIR=str(tmp_path))
    wait_for(tmp_path / "waits-0", tmp_path / "waits-1")
    job.send_signal(signal.SIGINT)
    code, screen = finish(job)
    assert code == 130 and "Traceback" not in screen
    assert not left_over(tmp_path) and not list(tmp_path.glob("ds4d-*"))
