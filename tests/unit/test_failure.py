"""A failed job speaks once; what people can mend comes without a traceback."""

from __future__ import annotations

import importlib.util
import io
import os
import socket
import subprocess
import sys

import pytest

from ds4d.data.errors import DataError
from ds4d.launch import failure, rank_log
from ds4d.launch.variables import Launch


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def report(error, folder, rank=0, world_size=2):
    screen = io.StringIO()
    launch = Launch(rank, world_size, rank, world_size, "127.0.0.1", 1)
    code = failure.report(raised(error), launch=launch, logs=folder, screen=screen)
    return code, screen.getvalue()


def test_first_rank_speaks_with_traceback_and_rank(tmp_path):
    code, said = report(KeyError("boom"), tmp_path, rank=1)
    assert code == 1
    assert "rank 1 of 2" in said and "KeyError: 'boom'" in said and "Traceback" in said
    assert str(tmp_path) in said


def test_only_the_first_rank_speaks(tmp_path, capfd):
    report(KeyError("boom"), tmp_path, rank=1)
    code, said = report(RuntimeError("Connection closed by peer"), tmp_path, rank=0)
    assert (code, said) == (1, "")
    assert "Connection closed by peer" in capfd.readouterr().err  # it stays in the rank's log


def test_a_single_process_always_speaks(tmp_path):
    for _ in range(2):
        assert "boom" in report(KeyError("boom"), tmp_path, world_size=1)[1]


@pytest.mark.parametrize("error", [DataError("corpus.txt is empty")])
def test_wrong_input_has_no_traceback(tmp_path, error):
    code, said = report(error, tmp_path)
    assert code == 2
    assert "ds4d: corpus.txt is empty" in said and "Traceback" not in said


def test_subclasses_count_and_strangers_do_not():
    class Special(DataError):
        pass

    assert failure.exit_code_for_people(Special("x")) == 2
    assert failure.exit_code_for_people(ValueError("x")) is None


def call(module_name, statement, folder):
    """What ``statement`` raises in a module of that name."""
    source = folder / "source.py"
    source.write_text(f"def run():\n    {statement}\n")
    spec = importlib.util.spec_from_file_location(module_name, source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(ValueError) as caught:
        module.run()
    return caught.value


def test_what_ds4d_refuses_is_for_people_and_bugs_are_not(tmp_path):
    refusal = "raise ValueError(\n        'steps is 0')"
    assert failure.exit_code_for_people(call("ds4d.fake", refusal, tmp_path)) == 2
    assert failure.exit_code_for_people(call("other.fake", refusal, tmp_path)) is None
    bug = "list(zip([1], [], strict=True))"
    assert failure.exit_code_for_people(call("ds4d.fake", bug, tmp_path)) is None


def test_lost_peer_names_the_rank_that_vanished(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host = socket.gethostname()
    (tmp_path / "rank-00000.log").write_text(f"==== t pid {os.getpid()} on {host}\n")
    (tmp_path / "rank-00001.log").write_text(f"==== t pid {dead.pid} on {host}\nlast words\n")
    (tmp_path / "rank-00002.log").write_text(
        f"==== t pid {dead.pid} on {host}\n==== t exit code 1\n"
    )
    assert rank_log.vanished(tmp_path, 4) == [1]
    _, said = report(RuntimeError("[pair.cc] Connection closed by peer"), tmp_path, world_size=4)
    assert "rank 0 of 4" in said and "lost contact with rank 1," in said
    assert "Traceback" not in said
