from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from ds4d.launch import runtime
from ds4d.launch.variables import Launch, LaunchError


def launch(**changes) -> Launch:
    place = dict(
        rank=1, world_size=4, local_rank=1, local_world_size=4, address="127.0.0.1", port=1
    )
    return Launch(**(place | changes))


def make_lock(folder, age_seconds: float):
    lock = folder / "py311_cpu" / "op" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, times=(time.time() - age_seconds,) * 2)
    return lock


@pytest.fixture
def extensions(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path


def test_a_lock_of_a_dead_build_is_removed(extensions, capsys):
    lock = make_lock(extensions, age_seconds=1000)
    runtime.remove_stale_locks()
    assert not lock.exists() and str(lock) in capsys.readouterr().out


def test_a_fresh_lock_stays(extensions):
    lock = make_lock(extensions, age_seconds=1)
    runtime.remove_stale_locks()
    assert lock.exists()


def test_a_lock_of_a_running_build_stays(extensions, tmp_path):
    lock = make_lock(extensions, age_seconds=1000)
    ninja = tmp_path / "ninja"  # a process of that name, at work in the lock's folder
    ninja.symlink_to("/bin/sleep")
    build = subprocess.Popen([str(ninja), "60"], cwd=lock.parent)
    try:
        runtime.remove_stale_locks()
        assert lock.exists()
    finally:
        build.kill()
        build.wait()


@pytest.fixture
def environ(monkeypatch):
    written: dict[str, str] = {"OMP_NUM_THREADS": "", "DS_ACCELERATOR": ""}
    launch().export(written)
    for name in written:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    return os.environ


def test_cores_are_shared_among_the_ranks_of_a_host(environ, monkeypatch):
    monkeypatch.setattr(runtime, "cores", lambda: 10)
    runtime.prepare_environment(launch())
    assert environ["OMP_NUM_THREADS"] == "2" and environ["RANK"] == "1"


def test_every_rank_has_a_thread_and_the_users_wish_counts(environ, monkeypatch):
    monkeypatch.setattr(runtime, "cores", lambda: 2)
    runtime.prepare_environment(launch())
    assert environ["OMP_NUM_THREADS"] == "1"
    environ["OMP_NUM_THREADS"] = "7"
    runtime.prepare_environment(launch())
    assert environ["OMP_NUM_THREADS"] == "7"


@pytest.fixture
def cuda(environ, monkeypatch):
    import torch

    def pretend(count: int) -> list:
        chosen: list = []
        environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        return chosen

    return pretend


def test_without_a_gpu_deepspeed_is_told_cpu(cuda, environ):
    cuda(0)
    assert runtime.choose_device(launch()).type == "cpu"
    assert environ["DS_ACCELERATOR"] == "cpu"


def test_each_rank_has_its_gpu(cuda, environ):
    chosen = cuda(4)
    assert runtime.choose_device(launch(local_rank=3)).index == 3
    assert [device.index for device in chosen] == [3] and environ["DS_ACCELERATOR"] == "cuda"


def test_one_visible_gpu_is_the_ranks_own(cuda):
    """As Slurm binds them."""
    cuda(1)
    assert runtime.choose_device(launch(local_rank=3)).index == 0


def test_more_ranks_than_gpus_are_refused(cuda):
    cuda(2)
    with pytest.raises(LaunchError, match="4 ranks on .* but 2 GPUs"):
        runtime.choose_device(launch())


def test_the_users_accelerator_counts(cuda, environ):
    cuda(4)
    environ["DS_ACCELERATOR"] = "cpu"
    assert runtime.choose_device(launch()).type == "cpu"


def test_run_folder():
    assert str(runtime.run_folder("a/b/quick.json", None)) == "runs/quick"
    assert str(runtime.run_folder("a/b/quick.json", "there")) == "there"


def test_worker_flags_of_the_launcher_belong_before_the_script(tmp_path):
    """E06: said by one rank, not by all."""
    command = [sys.executable, "-m", "ds4d.launch.worker", "x.json", "--master_port", "29501"]
    for rank, words in (("0", "go before launch/train.py"), ("1", "")):
        done = subprocess.run(
            command, env=os.environ | {"RANK": rank}, capture_output=True, text=True
        )
        assert done.returncode == 2 and words in done.stderr and bool(done.stderr) == bool(words)
