"""What a job would start, and what becomes of the launcher's exit code."""

from __future__ import annotations

import base64
import json
import sys
from dataclasses import replace

import pytest

from ds4d.config.errors import ConfigError
from ds4d.launch import runtime
from ds4d.launch.launcher import (
    Job,
    default_num_ranks,
    plan_job,
    read_hostfile,
    run_job,
)
from ds4d.launch.runtime import visible_gpus
from ds4d.launch.variables import LaunchError
from tests.unit.test_cli import CONFIG


@pytest.fixture
def config(tmp_path):
    def write(**parallel):
        file = tmp_path / "run.json"
        run = CONFIG | {"ds4d": CONFIG["ds4d"] | {"parallel": parallel}}
        file.write_text(json.dumps(run))
        return file

    return write


@pytest.fixture
def gpus(monkeypatch):
    """Pretend that the machine has so many GPUs."""
    import torch

    def pretend(count, visible=None):
        monkeypatch.setattr(runtime, "GPU_DRIVERS", ("/dev/null",))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.delenv("DS_ACCELERATOR", raising=False)
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return pretend


def hosts_of(job: Job) -> dict:
    word = next(w for w in job.command() if w.startswith("--world_info="))
    return json.loads(base64.urlsafe_b64decode(word.partition("=")[2]))


@pytest.mark.parametrize(
    "visible, count, expected",
    [
        (None, 2, ("0", "1")), ("2,3", 2, ("2", "3")), ("GPU-aa,GPU-bb", 2, ("GPU-aa", "GPU-bb")),
        ("1", 1, ("1",)), ("", 0, ()), ("0,7", 1, ("0",)),
    ],
)  # fmt: skip
def test_visible_gpus_keep_their_names(gpus, visible, count, expected):
    """E03: neither renumbered nor turned into numbers."""
    gpus(count, visible)
    assert visible_gpus() == expected


def test_ds_accelerator_cpu_hides_gpus(gpus, monkeypatch):
    gpus(2)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert visible_gpus() == ()


def test_the_first_visible_gpus_are_used(gpus, config, tmp_path):
    gpus(3, "5,6,7")
    job = plan_job(config(), output=tmp_path / "run", nproc=2)
    assert hosts_of(job) == {"localhost": ["5", "6"]}


def test_more_ranks_than_gpus_are_refused_with_both_numbers(gpus, config, tmp_path):
    gpus(2)
    with pytest.raises(LaunchError, match="4 ranks, but 2 GPUs"):
        plan_job(config(), output=tmp_path / "run", nproc=4)
    with pytest.raises(LaunchError, match="3 ranks, but 2 GPUs"):
        plan_job(config(dp=3), output=tmp_path / "run")


def test_on_cpu_deepspeed_is_told_so(config, tmp_path):
    job = plan_job(config(), output=tmp_path / "run", nproc=2)
    assert hosts_of(job) == {"localhost": [0, 1]}
    assert job.environment()["DS_ACCELERATOR"] == "cpu"


def test_worker_gets_the_arguments(config, tmp_path):
    job = plan_job(
        config(),
        output=tmp_path / "run",
        overrides=["ds4d.training.seed=1"],
        resume="auto",
        nproc=1,
    )
    words = job.command()
    assert words[words.index("--module") + 1] == "ds4d.launch.worker"
    assert words[-4:] == [
        f"--output={tmp_path}/run", "--set", "ds4d.training.seed=1", "--resume=auto",
    ]  # fmt: skip


def test_a_port_is_free_unless_given(config, tmp_path):
    job = plan_job(config(), output=tmp_path / "run", nproc=1)

    def port_of(job: Job) -> str:
        return next(w for w in job.command() if w.startswith("--master_port="))

    assert port_of(replace(job, port=12345)) == "--master_port=12345"
    assert port_of(job) != port_of(job)


def test_default_number_of_ranks(config):
    assert default_num_ranks(config(dp="auto"), (), 0) == 1
    assert default_num_ranks(config(dp=2), (), 0) == 2
    assert default_num_ranks(config(dp="auto"), (), 4) == 4
    assert default_num_ranks(config(dp=2), (), 4) == 2  # the file says how many


def test_a_wrong_file_starts_nothing(config, tmp_path):
    with pytest.raises(ConfigError):
        plan_job(config(dp=3), output=tmp_path / "run", nproc=2)
    assert not (tmp_path / "run").exists()


def test_hostfile_sets_the_world_size(config, tmp_path):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# ours\nnode0 slots=2\nnode1 slots=1\n")
    job = plan_job(config(), output=tmp_path / "run", hostfile=hostfile)
    assert job.num_ranks == 3
    words = replace(job, address="10.0.0.1").command()
    assert "deepspeed.launcher.runner" in words and f"--hostfile={hostfile}" in words
    assert "--master_addr=10.0.0.1" in words


@pytest.mark.parametrize("text", ["", "node0\n", "node0 slots=1\nnode0 slots=2\n"])
def test_a_hostfile_that_deepspeed_refuses(tmp_path, text):
    hostfile = tmp_path / "hosts"
    hostfile.write_text(text)
    with pytest.raises(LaunchError, match="hosts: "):
        read_hostfile(hostfile)


def test_no_hostfile(tmp_path):
    with pytest.raises(LaunchError, match="no such file"):
        read_hostfile(tmp_path / "hosts")


def test_a_run_folder_that_cannot_be_made(config, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match="cannot write to the run folder"):
        plan_job(config(), output=tmp_path / "file" / "run", nproc=1)


class Exits(Job):
    """A job whose launcher ends at once with the code that is its argument."""

    def command(self) -> list[str]:
        return [sys.executable, "-c", f"raise SystemExit({self.args[0]})"]


@pytest.mark.parametrize(
    "launcher, ours, said",
    [(0, 0, ""), (2, 2, ""), (1, 1, ""), (255, 1, ""), (247, 1, "SIGKILL"), (241, 1, "SIGTERM")],
)
def test_exit_codes(capsys, launcher, ours, said):
    assert run_job(Exits((str(launcher),), 1)) == ours
    told = capsys.readouterr().err
    assert said in told and bool(told) == bool(said)
