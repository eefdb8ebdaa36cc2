"""What every schedule costs, against the formulas (p ranks, v chunks, m micro-batches; r a rank; F,
B, I, W the time of a pass), and schedules that cannot be run."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise, product

import pytest

from ds4d.pipeline.actions import Action, Kind, Placement, Schedule
from ds4d.pipeline.schedules import forward_only, make_schedule
from ds4d.pipeline.simulate import Costs, ScheduleError, simulate

# F, I, W
ALIKE = (1.0, 1.0, 1.0)
UNLIKE = (2.0, 3.0, 1.5)
MICRO_BATCHES = (1, 2, 3, 4, 7, 8, 13, 16)


def run(name, p, v, m, costs=ALIKE, **kwargs):
    schedule = make_schedule(name, ranks=p, chunks=v, micro_batches=m)
    forward, input, weight = costs
    stages = schedule.placement.stages
    costs = Costs.equal(stages, forward=forward, input=input, weight=weight)
    return simulate(schedule, costs, **kwargs)


def idle_of_all(done) -> float:
    """Where all stages are alike, so is the idle time of all ranks."""
    first, *others = done.timeline.idle
    assert others == pytest.approx([first] * len(others))
    return pytest.approx(first)


@pytest.mark.parametrize("costs", [ALIKE, UNLIKE])
@pytest.mark.parametrize("p, m", [*product((1, 2, 3, 8), MICRO_BATCHES)])
def test_gpipe_and_1f1b(p, m, costs):
    forward, backward = costs[0], costs[1] + costs[2]
    for name, held in {
        "gpipe": [m] * p,
        "1f1b": [min(m, p - r) for r in range(p)],
        "interleaved": [min(m, p - r) for r in range(p)],  # with one chunk
    }.items():
        done = run(name, p, 1, m, costs)
        assert idle_of_all(done) == (p - 1) * (forward + backward)
        assert done.timeline.length == pytest.approx((m + p - 1) * (forward + backward))
        assert list(done.held_until_input) == list(done.held_until_weight) == held


@pytest.mark.parametrize("costs", [ALIKE, UNLIKE])
@pytest.mark.parametrize("p, v, m", [*product((2, 3, 4, 8), (2, 3), (*MICRO_BATCHES, 33))])
def test_interleaved(p, v, m, costs):
    """Costs are of a chunk, so (p - 1)(F + B) is the bubble of 1F1B over v."""
    done = run("interleaved", p, v, m, costs)
    forward, backward = costs[0], costs[1] + costs[2]
    if m >= p:
        assert idle_of_all(done) == (p - 1) * (forward + backward)
        group = -(-m // (m // p))
        held = [min(m * v, 2 * (p - r - 1) + (v - 1) * group + 1) for r in range(p)]
        assert list(done.held_until_input) == held
    else:  # the last micro-batch goes through all stages, there and back, m - 1 after the first
        assert done.timeline.length == pytest.approx((p * v + m - 1) * (forward + backward))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved", "dualpipev", "zbv"])
def test_no_deadlock_whatever_the_numbers(name):
    """Every combination up to 8 ranks, 4 chunks, 40 micro-batches."""
    shapes = product(range(1, 9), range(1, 5) if name == "interleaved" else (1,), range(1, 41))
    for p, v, m in shapes:
        if name != "dualpipev" or m >= 2 * p:
            run(name, p, v, m)


@pytest.mark.parametrize("costs", [ALIKE, UNLIKE, (1.0, 2.0, 0.5), (1.0, 1.0, 0.25)])
@pytest.mark.parametrize("p, m", [*product((1, 2, 4, 8), (1, 3, 8, 9, 24))])
def test_zb_h1(p, m, costs):
    """(p - 1)(F + B - 2W) as the paper has it, if W <= F and W <= I and m >= p."""
    forward, input, weight = costs
    done = run("zb-h1", p, 1, m, costs)
    idle = (p - 1) * (forward + input - weight)
    if m >= p:
        assert idle_of_all(done) == idle
    else:
        assert idle < done.timeline.idle[0] < (p - 1) * sum(costs)
    assert list(done.held_until_input) == [min(m, p - r) for r in range(p)]
    assert list(done.held_until_weight) == [min(m, p)] * p


@pytest.mark.parametrize("costs", [ALIKE, UNLIKE, (1.0, 0.5, 0.5), (1.0, 0.5, 0.75), (1.0, 2, 3)])
@pytest.mark.parametrize("p, more", [*product((1, 2, 3, 4, 8), (0, 1, 9))])
def test_dualpipev(p, more, costs):
    """The published bubble, (p - 1)(F&B + B - 3W) on p ranks, is that of weight halves made late
    and of a forward and a backward at once. With full backwards, one pass at a time, this order has
    max((p - 1)(F + B), 2(p - 1)B - F), F and B of a chunk, for F <= B and every m >= 2p: found by
    simulation, exact here. For B = 2F: about 2/3 of 1F1B's, 4/3 of that of two interleaved chunks.
    Held: 2p + 1 of 2p stages, on every rank, as published."""
    forward, backward = costs[0], costs[1] + costs[2]
    done = run("dualpipev", p, 2, 2 * p + more, costs)
    if p > 1:
        assert idle_of_all(done) == max(
            (p - 1) * (forward + backward), 2 * (p - 1) * backward - forward
        )
    assert list(done.held_until_input) == [min(2 * p + 1, 2 * (2 * p + more))] * p


@pytest.mark.parametrize("costs", [ALIKE, UNLIKE, (1.0, 1.0, 0.5), (1.0, 1.25, 0.75)])
@pytest.mark.parametrize("p, m", [*product((1, 2, 3, 4, 8), (*MICRO_BATCHES, 33))])
def test_zbv(p, m, costs):
    """(p - 1)I, of a chunk, if W <= F <= I <= 2W and m >= 2p - 1; where all are alike, the last
    rank only waits for the first micro-batch, which nothing can save it. Not much more if m >= p.
    Of fewer the last one goes through all stages, there and back, and all are together as long as
    that, or little longer. Held: p stages' worth on every rank, as 1F1B on its first."""
    done = run("zbv", p, 2, m, costs)
    forward, input, weight = costs
    if m >= 2 * p - 1:
        assert idle_of_all(done) == (p - 1) * input
    elif m >= p:
        assert done.timeline.idle[0] <= 1.35 * (p - 1) * input
    else:
        through = (2 * p + m - 1) * forward + 2 * p * input + weight
        assert through <= done.timeline.length <= 1.5 * through
    assert list(done.held_until_weight) == [2 * min(m, p)] * p
    assert max(done.held_until_input) <= 2 * min(m, p)


@pytest.mark.parametrize("costs", [ALIKE, UNLIKE, (1.0, 1.25, 0.75), (55.0, 87.0, 36.0)])
@pytest.mark.parametrize("head", [1.0, 1.5, 3.0])
def test_zbv_of_two_ranks_never_waits_where_the_head_is(costs, head):
    """A head, with loss and gradients part of the last forward, makes its rank the busier one: then
    nothing can be faster than that."""
    forward, input, weight = costs
    last = (1 + head) * forward
    for m in MICRO_BATCHES[2:]:
        schedule = make_schedule("zbv", ranks=2, chunks=2, micro_batches=m)
        done = simulate(schedule, Costs((*[forward] * 3, last), (input,) * 4, (weight,) * 4))
        assert done.timeline.busy[0] == pytest.approx(done.timeline.length)


@pytest.mark.parametrize("costs", [ALIKE, UNLIKE, (1.0, 1.25, 0.75)])
@pytest.mark.parametrize("p, more", [*product((2, 3, 4, 8), (0, 1, 9))])
def test_zbv_idles_least(p, more, costs):
    shapes = {"1f1b": 1, "zb-h1": 1, "interleaved": 2, "dualpipev": 2, "zbv": 2}
    idle = {}
    for name, v in shapes.items():
        done = run(name, p, v, 2 * p + more, tuple(cost / v for cost in costs))
        idle[name] = done.timeline.bubble
    assert idle.pop("zbv") < 0.8 * min(idle.values())


def test_evaluation_is_as_short_as_can_be():
    for p, v, m in product((1, 2, 3, 8), (1, 2, 3), (1, 4, 9, 16)):
        done = simulate(forward_only(Placement.loop(p, v), m))
        groups, rest = divmod(m, p)
        last_group = rest or p
        # full groups one behind the other, the last one through all stages
        assert done.timeline.length <= (groups - (not rest)) * p * v + p * v + last_group - 1
    for p, m in product((1, 2, 3, 8), (1, 4, 9)):
        # the last rank has the first micro-batch after p - 1 passes, then 2m of its own
        done = simulate(forward_only(Placement.vee(p), m))
        assert done.timeline.length == 2 * m + 2 * (p - 1)


def test_spans_of_a_small_case_with_uneven_stages_and_a_transfer():
    schedule = make_schedule("1f1b", ranks=2, chunks=1, micro_batches=2)
    costs = Costs(forward=(1, 2), input=(3, 1), weight=(0, 1))
    done = simulate(schedule, costs, transfer=0.5)
    told = [[(str(a), start, end) for a, start, end in lane] for lane in done.timeline.lanes]
    assert told == [
        [("F0.0", 0, 1), ("F0.1", 1, 2), ("B0.0", 6, 9), ("B0.1", 10, 13)],
        [("F0.0", 1.5, 3.5), ("B0.0", 3.5, 5.5), ("F0.1", 5.5, 7.5), ("B0.1", 7.5, 9.5)],
    ]
    assert done.timeline.busy == (8, 8) and done.timeline.idle == (5, 5)
    assert done.timeline.bubble == 5 / 13


def test_no_transfer_within_a_rank():
    """Where the vee turns, both stages are on the last rank."""
    schedule = forward_only(Placement.vee(2), 1)
    assert simulate(schedule, transfer=10).timeline.length == 4 + 2 * 10


# -- what cannot be run -------------------------------------------------------------------------

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1)]
SCHEDULES += [("interleaved", 2), ("dualpipev", 2), ("zbv", 2)]


def broken(schedule: Schedule, rank: int, order) -> str:
    orders = list(schedule.actions)
    orders[rank] = tuple(order)
    with pytest.raises(ScheduleError) as caught:
        simulate(replace(schedule, actions=tuple(orders)))
    return str(caught.value)


@pytest.fixture(params=SCHEDULES, ids=[name for name, _ in SCHEDULES])
def schedule(request):
    name, chunks = request.param
    return make_schedule(name, ranks=3, chunks=chunks, micro_batches=7)


def test_any_pass_left_out_or_made_twice(schedule):
    for rank, order in enumerate(schedule.actions):
        for place, action in enumerate(order):
            said = broken(schedule, rank, order[:place] + order[place + 1 :])
            assert said.startswith(f"rank {rank}: ") and str(action) in said
            said = broken(schedule, rank, (*order, action))
            assert said == f"rank {rank}: {action} comes again, when nothing is due"


def test_any_order_reversed_and_any_backward_before_its_forward(schedule):
    for rank, order in enumerate(schedule.actions):
        assert "is due" in broken(schedule, rank, order[::-1])
        for chunk, i in product(range(schedule.placement.chunks), range(7)):
            passes = (n for n, each in enumerate(order) if each[1:] == (chunk, i))
            for first, second in pairwise(passes):
                swapped = list(order)
                swapped[first], swapped[second] = swapped[second], swapped[first]
                said = broken(schedule, rank, swapped)
                assert said.startswith(f"rank {rank}: {order[second]} comes when ")


@pytest.mark.parametrize("name", ["interleaved", "dualpipev", "zbv"])
def test_chunks_swapped_on_a_rank_deadlock(name):
    schedule = make_schedule(name, ranks=3, chunks=2, micro_batches=7)
    for rank, order in enumerate(schedule.actions):
        said = broken(schedule, rank, (each._replace(chunk=1 - each.chunk) for each in order))
        assert said.startswith("deadlock: ") and f"rank {rank} at F1.0 waits for F" in said


def test_a_deadlock_names_who_waits_for_what():
    """Rank 0 wants the backward of 0 before it makes the forward of 1, rank 1 the other way."""
    F, B = Kind.FORWARD, Kind.BACKWARD
    first = tuple(Action(kind, 0, i) for i in (0, 1) for kind in (F, B))
    last = tuple(Action(kind, 0, i) for kind in (F, B) for i in (0, 1))
    with pytest.raises(ScheduleError) as caught:
        simulate(Schedule("bad", Placement.loop(2, 1), 2, (first, last)))
    assert str(caught.value) == (
        "deadlock: rank 0 at B0.0 waits for B0.0 of rank 1; rank 1 at F0.1 waits for F0.1 of rank 0"
    )


def test_a_large_deadlock_is_told_in_short():
    schedule = make_schedule("gpipe", ranks=16, chunks=1, micro_batches=2)
    order = schedule.actions[0]
    said = broken(schedule, 0, (order[0], order[2], order[1], order[3]))
    assert said.count("waits for") == 8 and said.endswith("; and 8 ranks more")


@pytest.mark.parametrize(
    "wrong", [Action(Kind.FORWARD, 1, 0), Action(Kind.FORWARD, 0, 7), Action(Kind.FORWARD, 0, -1)]
)
def test_passes_of_nothing_that_is_there(wrong):
    schedule = make_schedule("1f1b", ranks=3, chunks=1, micro_batches=7)
    said = broken(schedule, 0, (*schedule.actions[0], wrong))
    assert said == f"rank 0: {wrong} is of no chunk or micro-batch here"


@pytest.mark.parametrize("extra", [Kind.INPUT, Kind.WEIGHT])
def test_half_a_backward_after_a_whole_one(extra):
    schedule = make_schedule("1f1b", ranks=2, chunks=1, micro_batches=2)
    said = broken(schedule, 1, (*schedule.actions[1], Action(extra, 0, 1)))
    assert said == f"rank 1: {extra}0.1 comes when nothing is due"


def test_an_evaluation_is_checked_too():
    schedule = forward_only(Placement.loop(2, 1), 3)
    assert broken(schedule, 1, schedule.actions[1][:-1]) == "rank 1: F0.2 is missing"


def test_time_grows_with_the_passes_alone():
    schedule = make_schedule("interleaved", ranks=64, chunks=8, micro_batches=64)
    start = time.process_time()
    simulate(schedule)
    assert time.process_time() - start < 3  # 65,536 passes
