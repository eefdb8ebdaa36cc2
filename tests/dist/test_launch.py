"""Jobs as users start them (E06, E07, E08): exit codes, one report, nothing left running."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
RANK = [sys.executable, "-m", "tests.dist.launched"]
START = """
import sys
from ds4d.launch.launcher import Job, run_job
sys.exit(run_job(Job(tuple(sys.argv[1:]), 2, module="tests.dist.launched")))
"""
TIMEOUT_SECONDS = 120


def environment(**more: str) -> dict[str, str]:
    launcher = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    clean = {k: v for k, v in os.environ.items() if k not in (*launcher, "OMP_NUM_THREADS")}
    return clean | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)} | more


def start(command: list[str], **variables: str) -> subprocess.Popen:
    """As from a terminal, where Ctrl-C counts: a shell's background job would ignore it."""
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(**variables), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def finish(process: subprocess.Popen) -> tuple[int, str]:
    screen, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    return process.returncode, screen


def start_job(output: Path, steps: str) -> subprocess.Popen:
    return start([sys.executable, "-c", START, steps, str(output)])


def run_pair(output: Path, steps: str) -> tuple[list[int], str]:
    """Two ranks without the launcher (its imports cost seconds): exit codes, both screens."""
    from ds4d.launch.variables import free_port

    common = dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    common["MASTER_PORT"] = str(free_port())
    ranks = [
        start([*RANK, steps, str(output)], RANK=str(rank), LOCAL_RANK=str(rank), **common)
        for rank in range(2)
    ]
    results = [finish(process) for process in ranks]
    return [code for code, _ in results], "".join(screen for _, screen in results)


def left_over(output: Path) -> list[psutil.Process]:
    """Processes of the job that still live; all get some seconds to go."""
    deadline = time.monotonic() + 5
    while True:
        left = [p for p in psutil.process_iter() if str(output) in " ".join(_cmdline(p))]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def wait_for(*files: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, f"no {files}"
        time.sleep(0.05)


def test_one_process_without_a_launcher(tmp_path):
    """E08; and only our words are on the screen, the noise is in the log."""
    code, screen = finish(start([*RANK, "noise,meet", str(tmp_path)]))
    assert code == 0
    assert screen.startswith("sum 1,") and screen.count("\n") == 1
    log = (tmp_path / "logs/rank-00000.log").read_text()
    for noise in ("print noise", "warning noise", "native noise"):
        assert noise in log


def test_what_libraries_do_after_the_end_does_no_harm(tmp_path):
    code, screen = finish(start([*RANK, "abort_in_teardown", str(tmp_path)]))
    assert (code, screen) == (0, "")
    assert (tmp_path / "an-exit-handler-ran").exists()


def test_a_rank_that_raises_speaks_once(tmp_path):
    codes, screen = run_pair(tmp_path, "meet,raise_on_1,meet")
    assert codes == [1, 1]
    assert screen.count("Traceback") == 1
    assert "rank 1 of 2" in screen and "ArithmeticError: rank 1 stumbles" in screen
    assert "Connection" not in screen
    assert "timeout 60 s" in screen  # of groups made without a timeout, as DeepSpeed does
    assert "Connection" in (tmp_path / "logs/rank-00000.log").read_text()


@pytest.mark.parametrize("how", ["kill_1", "exit_1"])
def test_a_rank_that_vanishes_is_named(tmp_path, how):
    codes, screen = run_pair(tmp_path, f"meet,{how},meet")
    assert codes == [1, -signal.SIGKILL if how == "kill_1" else 0]
    assert "rank 0 of 2" in screen and "lost contact with rank 1," in screen
    assert "Traceback" not in screen


def test_wrong_input_is_said_once_and_exits_2(tmp_path):
    codes, screen = run_pair(tmp_path, "wrong_input")
    assert codes == [2, 2]
    assert screen.count("corpus.txt is empty") == 1 and "Traceback" not in screen


def test_port_in_use_is_named(tmp_path):
    """E06"""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        place = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_PORT=str(port))
        code, screen = finish(start([*RANK, "meet", str(tmp_path)], **place))
    assert code == 2
    assert f"port {port}" in screen and "in use" in screen and "Traceback" not in screen


def test_half_a_set_of_variables_is_refused(tmp_path):
    """E08"""
    code, screen = finish(start([*RANK, "meet", str(tmp_path)], RANK="0", WORLD_SIZE="2"))
    assert code == 2 and "missing LOCAL_RANK, MASTER_ADDR, MASTER_PORT" in screen


def test_two_jobs_at_once_and_a_killed_rank(tmp_path):
    """E06, E07: the launcher's own words stay off the screen, its exit code is ours."""
    good, bad = tmp_path / "good", tmp_path / "bad"
    jobs = start_job(good, "noise,meet"), start_job(bad, "meet,kill_1,meet")
    (code, screen), (bad_code, bad_screen) = map(finish, jobs)
    assert code == 0 and screen.startswith("sum 2,") and screen.count("\n") == 1, screen
    assert bad_code == 1
    assert "lost contact with rank 1," in bad_screen
    assert not left_over(tmp_path)


def test_sigterm_lets_the_ranks_save_and_exit_0(tmp_path):
    job = start_job(tmp_path, "save_on_sigterm")
    wait_for(tmp_path / "waits-0", tmp_path / "waits-1")
    job.send_signal(signal.SIGTERM)
    code, _ = finish(job)
    assert code == 0
    assert (tmp_path / "saved-0").exists() and (tmp_path / "saved-1").exists()
    assert not left_over(tmp_path)


@pytest.mark.parametrize("victim", ["job", "launcher"])
def test_nothing_survives_a_killed_parent(tmp_path, victim):
    job = start_job(tmp_path, "wait")
    wait_for(tmp_path / "waits-0", tmp_path / "waits-1")
    (launcher,) = psutil.Process(job.pid).children()
    (job if victim == "job" else launcher).send_signal(signal.SIGKILL)
    code, _ = finish(job)
    assert code == (-signal.SIGKILL if victim == "job" else 1)
    assert not left_over(tmp_path)
