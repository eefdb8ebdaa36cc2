"""E08: full, partial and absent sets of launcher variables."""

from __future__ import annotations

import pytest

from ds4d.launch.variables import Launch, LaunchError, read_launch

TORCH = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host0", "MASTER_PORT": "29501",
}  # fmt: skip
MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "PMI_RANK": "5", "PMI_SIZE": "8",
}  # fmt: skip
MEETING = {"MASTER_ADDR": "host0", "MASTER_PORT": "29501"}


@pytest.mark.parametrize(
    "environ, expected",
    [
        (TORCH, Launch(1, 2, 1, 2, "host0", 29501)),
        (MPI, Launch(3, 4, 1, 2, None, None)),  # they meet over MPI
        (MPI | MEETING, Launch(3, 4, 1, 2, "host0", 29501)),
        (SLURM | MEETING, Launch(5, 8, 1, 4, "host0", 29501)),
        (TORCH | MPI | SLURM, Launch(1, 2, 1, 2, "host0", 29501)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"},
         Launch(0, 2, 0, 2, None, None)),
    ],
)  # fmt: skip
def test_full_sets(environ, expected):
    assert read_launch(environ) == expected


@pytest.mark.parametrize(
    "environ", [{}, {"MASTER_ADDR": "127.0.0.1"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}]
)
def test_no_launcher_is_a_world_of_one(environ):
    launch = read_launch(environ)
    assert (launch.rank, launch.world_size, launch.address) == (0, 1, "127.0.0.1")
    assert 1024 <= launch.port <= 65535


@pytest.mark.parametrize(
    "environ, missing",
    [
        ({"RANK": "0"}, "missing WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "2"}, "missing RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "1", "RANK": "0"}, "missing LOCAL_RANK;"),
        ({"LOCAL_RANK": "1"}, "missing RANK, WORLD_SIZE"),
        ({k: v for k, v in TORCH.items() if k != "MASTER_PORT"}, "missing MASTER_PORT;"),
        (
            {"OMPI_COMM_WORLD_SIZE": "2"},
            "missing OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_LOCAL_RANK;",
        ),
        ({"PMI_RANK": "0"}, "missing PMI_SIZE, MPI_LOCALRANKID;"),
        (SLURM, "missing MASTER_ADDR, MASTER_PORT;"),
    ],
)
def test_partial_sets_are_refused_by_name(environ, missing):
    with pytest.raises(LaunchError) as error:
        read_launch(environ)
    assert missing in str(error.value)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"RANK": "2"}, "RANK='2' must be a whole number, 0 to 1"),
        ({"RANK": "-1"}, "RANK='-1'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' must be a whole number, 1 or more"),
        ({"LOCAL_RANK": "one"}, "LOCAL_RANK='one'"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT='0' must be a whole number, 1 to 65535"),
    ],
)
def test_values_that_cannot_be(change, said):
    with pytest.raises(LaunchError) as error:
        read_launch(TORCH | change)
    assert said in str(error.value)


def test_export_speaks_torch():
    environ: dict[str, str] = {}
    read_launch(MPI | MEETING).export(environ)
    assert environ == {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "host0", "MASTER_PORT": "29501",
    }  # fmt: skip
