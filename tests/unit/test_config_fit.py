"""Degrees "auto": dealt out as the ranks, the model, the batch and the rest of the file allow."""

from __future__ import annotations

from typing import Any

import pytest

from ds4d.config.load import load, resolved
from tests.unit.config_files import changed, problems

AUTO = {"tp": "auto", "pp": "auto", "cp": "auto", "dp": "auto"}
ALL = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1}


def file(parallel: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A llama of 2 layers and 4 heads, 4 sequences a step."""
    return changed(**ALL, ds4d__parallel=AUTO | (parallel or {}), **more)


RNN = {"model_type": "rwkv", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": "auto"}
# file, ranks -> tp, pp, cp, dp
DEALT = {
    "no ranks known": (file(), None, (1, 1, 1, 1)),
    "in order": (file(), 2, (2, 1, 1, 1)),
    "all axes": (file(), 16, (2, 2, 2, 2)),
    "heads, layers and batch end": (file(), 128, (4, 2, 4, 4)),
    "a prime that only a sequence takes": (file(), 7, (1, 1, 7, 1)),
    "a number stays": (file({"cp": 4}), 8, (2, 1, 4, 1)),
    "dp stays": (file({"dp": 4}), 8, (2, 1, 1, 4)),
    "stages do not go with ZeRO-3": (file(zero_optimization={"stage": 3}), 8, (2, 1, 2, 2)),
    "a model that only stages cut": (
        file(ds4d__model__config=RNN, ds4d__data__packing="none"), 4, (1, 2, 1, 2),
    ),
}


@pytest.mark.parametrize("name", DEALT)
def test_degrees(name):
    content, world_size, degrees = DEALT[name]
    run = load(content, world_size=world_size)
    p = run.parallel
    assert (p.tp, p.pp, p.cp, p.dp) == degrees
    assert load(resolved(run), world_size=world_size).parallel == p


def test_what_does_not_fit_is_refused_as_without_auto():
    content = file({"dp": 3})
    assert problems(content, world_size=8) == {
        "ds4d.parallel": "tp 1 x pp 1 x cp 1 x dp 3 = 3, but the world has 8 ranks; write "
        '"dp": "auto", or start 3 ranks',
    }


def test_other_problems_do_not_hide_what_fits():
    content = file(gradient_clipping="much")
    assert set(problems(content, world_size=8)) == {"gradient_clipping"}


HOSTS = {"node0": 6, "node1": 6}


def test_a_tp_group_on_two_hosts_is_said():
    content = changed(ds4d__parallel={"tp": 4})
    run = load(content, hosts=HOSTS)
    assert run.parallel.world_size == 12
    assert run.notes == (
        "ds4d.parallel.tp 4: ranks 4 to 7 would share matrices over the network between node0 and "
        "node1, and wait for it several times a layer; with tp 2 every group is inside a host",
    )


def test_tp_groups_inside_hosts_are_not():
    assert load(changed(ds4d__parallel={"tp": 2}), hosts=HOSTS).notes == ()
