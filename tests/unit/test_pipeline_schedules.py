"""The orders of passes themselves; their times and activations: test_pipeline_simulate.py."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace

import pytest
from deepspeed.runtime.pipe.schedule import BackwardPass, DualPipeVSchedule, ForwardPass
from torch.distributed.pipelining import schedules as torch_schedules

from ds4d.pipeline.actions import Action, Kind, Placement
from ds4d.pipeline.engine import SPLIT_BACKWARD
from ds4d.pipeline.schedules import chunks_of, forward_only, make_schedule, placement_of

SHAPES = [  # schedule, ranks, chunks, micro-batches
    (name, p, v, m)
    for name, chunks in {"gpipe": [1], "1f1b": [1], "zb-h1": [1], "interleaved": [1, 2, 3]}.items()
    for v in chunks
    for p in (1, 2, 4, 5)
    for m in (1, 3, 4, 9)
]
SHAPES += [("dualpipev", p, 2, m) for p in (1, 2, 5) for m in (2 * p, 2 * p + 3)]
SHAPES += [("zbv", p, 2, m) for p in (1, 2, 4, 5) for m in (1, 3, 4, 9)]


def words(order) -> str:
    return " ".join(map(str, order))


@pytest.mark.parametrize(
    "name, rank, order",
    [
        ("gpipe", 0, "F0.0 F0.1 F0.2 B0.0 B0.1 B0.2"),
        ("1f1b", 0, "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2"),
        ("1f1b", 1, "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2"),
        ("zb-h1", 0, "F0.0 F0.1 I0.0 W0.0 F0.2 I0.1 W0.1 I0.2 W0.2"),
        ("zb-h1", 1, "F0.0 I0.0 F0.1 I0.1 W0.0 F0.2 I0.2 W0.1 W0.2"),
    ],
)
def test_two_ranks_three_micro_batches(name, rank, order):
    made = make_schedule(name, ranks=2, chunks=1, micro_batches=3)
    assert words(made.actions[rank]) == order


def test_interleaved_takes_a_group_through_all_chunks():
    made = make_schedule("interleaved", ranks=2, chunks=2, micro_batches=4)
    assert words(made.actions[0]) == (
        "F0.0 F0.1 F1.0 F1.1 F0.2 B1.0 F0.3 B1.1 F1.2 B0.0 F1.3 B0.1 B1.2 B1.3 B0.2 B0.3"
    )
    assert words(made.actions[1]) == (
        "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 F0.2 B0.0 F0.3 B0.1 F1.2 B1.2 F1.3 B1.3 B0.2 B0.3"
    )


@pytest.mark.parametrize("name, p, v, m", SHAPES)
def test_every_pass_is_there_once_and_in_order(name, p, v, m):
    made = make_schedule(name, ranks=p, chunks=v, micro_batches=m)
    assert (made.name, made.micro_batches, len(made.actions)) == (name, m, p)
    kinds = "FIW" if name in SPLIT_BACKWARD else "FB"
    for order in made.actions:
        assert Counter(order) == Counter(
            Action(Kind(kind), chunk, i) for kind in kinds for chunk in range(v) for i in range(m)
        )
        for kind in kinds:
            for chunk in range(v):
                mine = [a.micro_batch for a in order if (a.kind, a.chunk) == (kind, chunk)]
                assert mine == list(range(m))


def test_zbv_goes_down_and_up_and_makes_weight_halves_where_it_would_wait():
    made = make_schedule("zbv", ranks=2, chunks=2, micro_batches=4)
    assert words(made.actions[0]) == (
        "F0.0 F0.1 F0.2 F1.0 I1.0 W1.0 F1.1 I1.1 W1.1 F0.3 I0.0 W0.0 F1.2 I1.2 W1.2 I0.1 F1.3 "
        "I1.3 W0.1 I0.2 W1.3 W0.2 I0.3 W0.3"
    )
    assert words(made.actions[1]) == (
        "F0.0 F1.0 F0.1 F1.1 I1.0 W1.0 F0.2 I0.0 W0.0 F1.2 I1.1 W1.1 F0.3 I0.1 W0.1 F1.3 I1.2 "
        "I0.2 I1.3 I0.3 W1.2 W0.2 W1.3 W0.3"
    )


@pytest.mark.parametrize("p", [1, 2, 3, 8])
def test_zbv_has_the_forwards_and_input_halves_of_torch(p):
    """For as many micro-batches as torch's order is for, and for fewer."""
    for m in (1, p, 2 * p - 1, 2 * p, 3 * p + 1):
        made = make_schedule("zbv", ranks=p, chunks=2, micro_batches=m)
        for rank, order in enumerate(made.actions):
            assert [a for a in order if a.kind is not Kind.WEIGHT] == torch_zbv(p, m, rank)


def torch_zbv(p, m, rank) -> list[Action]:
    kinds = {torch_schedules.FORWARD: Kind.FORWARD, torch_schedules.BACKWARD_INPUT: Kind.INPUT}
    asked = SimpleNamespace(pp_group_size=p, num_stages=2 * p, _n_microbatches=m)
    made = torch_schedules.ScheduleZBVZeroBubble._calculate_single_rank_operations(asked, rank)
    return [
        Action(kinds[each.computation_type], int(each.stage_index >= p), each.microbatch_index)
        for each in made
        if each is not None and each.computation_type in kinds
    ]


def deepspeed_order(p, m, rank):
    """Of DeepSpeed's instructions those that compute; its buffer is phase * m + micro-batch."""
    kinds = {ForwardPass: Kind.FORWARD, BackwardPass: Kind.BACKWARD}
    steps = DualPipeVSchedule(micro_batches=m, stages=p, stage_id=rank).steps()
    return tuple(
        Action(kinds[type(each)], *divmod(each.buffer_id, m))
        for step in steps
        for each in step
        if type(each) in kinds
    )


@pytest.mark.parametrize("p, extra", [(1, 0), (2, 0), (2, 1), (4, 0), (4, 5), (8, 0), (8, 24)])
def test_dualpipev_is_that_of_deepspeed(p, extra):
    m = 2 * p + extra
    made = make_schedule("dualpipev", ranks=p, chunks=2, micro_batches=m)
    assert made.actions == tuple(deepspeed_order(p, m, rank) for rank in range(p))
    assert made.placement == Placement.vee(p)


@pytest.mark.parametrize(
    "placement", [Placement.loop(3, 1), Placement.loop(2, 3), Placement.vee(4)]
)
@pytest.mark.parametrize("m", [1, 2, 7])
def test_evaluation_has_forwards_alone(placement, m):
    made = forward_only(placement, m)
    for order in made.actions:
        assert sorted(order) == [
            Action(Kind.FORWARD, chunk, i) for chunk in range(placement.chunks) for i in range(m)
        ]


def test_evaluation_goes_round_the_loop_before_it_takes_more():
    made = forward_only(Placement.loop(2, 2), 3)
    assert words(made.actions[0]) == "F0.0 F0.1 F1.0 F1.1 F0.2 F1.2"


def test_chunks_and_places():
    assert chunks_of("dualpipev", 1) == chunks_of("dualpipev", 2) == 2
    assert chunks_of("interleaved", 3) == 3 and chunks_of("1f1b", 1) == 1
    assert placement_of("dualpipev", 3, 1) == placement_of("zbv", 3, 1) == Placement.vee(3)
    assert placement_of("interleaved", 3, 2) == Placement.loop(3, 2)
    loop = Placement.loop(3, 2)
    assert [list(loop.of_rank(rank)) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert [list(Placement.vee(3).of_rank(rank)) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]


@pytest.mark.parametrize(
    "name, chunks, m, said",
    [
        ("gpipe", 2, 8, "chunks 2: ds4d.pipeline.schedule 'gpipe' has always 1 on each rank"),
        ("1f1b", 2, 8, "chunks 2"),
        ("zb-h1", 4, 8, "chunks 4"),
        ("zbv", 4, 8, "chunks 4: ds4d.pipeline.schedule 'zbv' has always 2"),
        ("dualpipev", 3, 8, "chunks 3: ds4d.pipeline.schedule 'dualpipev' has always 2"),
        ("dualpipev", 2, 7, "gradient_accumulation_steps 7 is too few"),
    ],
)
def test_what_a_schedule_cannot_have(name, chunks, m, said):
    with pytest.raises(ValueError) as caught:
        make_schedule(name, ranks=4, chunks=chunks, micro_batches=m)
    assert said in str(caught.value)


@pytest.mark.parametrize("name, chunks", [("interleaved", 4), ("zbv", 2)])
def test_a_large_schedule_is_made_in_no_time(name, chunks):
    start = time.process_time()
    make_schedule(name, ranks=32, chunks=chunks, micro_batches=128)
    assert time.process_time() - start < 1
