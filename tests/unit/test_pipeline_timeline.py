"""The picture and the trace of a step."""

from __future__ import annotations

import json
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from ds4d.pipeline.actions import Action, Kind, Span
from ds4d.pipeline.schedules import make_schedule
from ds4d.pipeline.simulate import simulate
from ds4d.pipeline.timeline import IDLE, Timeline, summary, to_chrome_trace, to_svg

SVG = "{http://www.w3.org/2000/svg}"
SCHEDULES = [("gpipe", 1), ("interleaved", 3), ("zb-h1", 1), ("dualpipev", 2), ("zbv", 2)]


def simulated(name, chunks) -> Timeline:
    return simulate(make_schedule(name, ranks=4, chunks=chunks, micro_batches=12)).timeline


@pytest.fixture(params=SCHEDULES, ids=[name for name, _ in SCHEDULES])
def timeline(request):
    return simulated(*request.param)


@pytest.fixture
def measured():
    """Of two ranks, by a clock that is not 0 at the start of the step."""
    first = (Span(Action(Kind.FORWARD, 0, 0), 100.0, 101.0),)
    last = (
        Span(Action(Kind.FORWARD, 0, 0), 101.5, 102.0),
        Span(Action(Kind.BACKWARD, 0, 0), 102.5, 104.0),
    )
    return Timeline("measured <&> told", (first, last))


def boxes(lane) -> list[tuple[float, float]]:
    """Left and right of each pass in a lane."""
    passes = (rect for rect in lane.iter(f"{SVG}rect") if rect.get("class") == "pass")
    lefts_widths = ((float(rect.get("x")), float(rect.get("width"))) for rect in passes)
    return [(left, left + width) for left, width in lefts_widths]


def test_a_rectangle_a_pass_and_none_over_another(timeline):
    root = ElementTree.fromstring(to_svg(timeline))
    lanes = root.findall(f"{SVG}g[@class='lane']")
    assert [len(boxes(lane)) for lane in lanes] == [len(lane) for lane in timeline.lanes]
    for lane in lanes:
        background = next(rect for rect in lane.iter(f"{SVG}rect") if rect.get("fill") == IDLE)
        left, width = float(background.get("x")), float(background.get("width"))
        told = boxes(lane)
        assert all(end <= start + 0.002 for (_, end), (start, _) in pairwise(told))
        assert told[0][0] >= left - 0.001 and told[-1][1] <= left + width + 0.001


def test_where_a_measured_pass_is_drawn(measured):
    root = ElementTree.fromstring(to_svg(measured))
    first, last = (boxes(lane) for lane in root.findall(f"{SVG}g[@class='lane']"))
    assert first == [(64, 364)] and last == [(514, 664), (814, 1264)]
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"measured <&> told", "rank 0", "rank 1", "75.0%", "50.0%", "seconds"} <= set(texts)
    assert {"0", "0.5", "1", "3.5", "4"} <= set(texts)  # the axis


def fills(timeline) -> dict[str, str]:
    """Name and chunk of a pass -> colour."""
    root = ElementTree.fromstring(to_svg(timeline))
    passes = (rect for rect in root.iter(f"{SVG}rect") if rect.get("class") == "pass")
    told = [(rect.find(f"{SVG}title").text, rect.get("fill")) for rect in passes]
    return {f"{t.split(' of micro')[0]}, {t.split(', ')[1].split(':')[0]}": f for t, f in told}


def test_every_kind_and_chunk_has_its_colour_and_the_legend_says_which():
    halves, chunks = fills(simulated("zb-h1", 1)), fills(simulated("interleaved", 3))
    assert set(halves) == {
        "forward, chunk 0", "backward of inputs, chunk 0", "backward of weights, chunk 0"
    }  # fmt: skip
    assert len(chunks) == 6 and len(set(chunks.values())) == 6
    colours = {*halves.values(), *chunks.values()}
    assert len(colours) == 3 + 6 - 1 and IDLE not in colours  # forward of chunk 0 is in both
    drawing = ElementTree.fromstring(to_svg(simulated("interleaved", 3)))
    legend = {rect.get("fill") for rect in drawing.findall(f"{SVG}rect")}
    assert legend >= {*chunks.values(), IDLE}
    texts = {text.text for text in drawing.findall(f"{SVG}text")}
    assert texts >= {"forward, chunk 0 to 2", "backward, chunk 0 to 2", "idle"}


def test_numbers_stand_where_they_fit():
    few, many = (
        ElementTree.fromstring(
            to_svg(simulate(make_schedule("1f1b", ranks=2, chunks=1, micro_batches=m)).timeline)
        )
        for m in (3, 300)
    )
    numbers = [text.text for text in few.find(f"{SVG}g").iter(f"{SVG}text")]
    assert sorted(numbers[2:]) == ["0", "0", "1", "1", "2", "2"]
    assert len(list(many.find(f"{SVG}g").iter(f"{SVG}text"))) == 2  # the rank and its idle time


def test_trace(timeline, measured):
    for each in (timeline, measured):
        told = json.loads(json.dumps(to_chrome_trace(each)))
        names = [event["args"]["name"] for event in told["traceEvents"] if event["ph"] == "M"]
        assert names == [each.title, *(f"rank {rank}" for rank in range(len(each.lanes)))]
        passes = [event for event in told["traceEvents"] if event["ph"] == "X"]
        for rank, lane in enumerate(each.lanes):
            mine = [event for event in passes if event["tid"] == rank]
            assert [event["name"] for event in mine] == [str(span.action) for span in lane]
            for event, (action, start, end) in zip(mine, lane, strict=True):
                assert (event["ts"], event["dur"]) == pytest.approx(
                    (start * 1e6, (end - start) * 1e6)
                )
                assert event["args"] == {"chunk": action.chunk, "micro_batch": action.micro_batch}


def test_summary(measured):
    assert summary(measured) == {
        "title": "measured <&> told",
        "unit": "seconds",
        "length": 4.0,
        "bubble": 0.625,
        "ranks": [
            {"rank": 0, "busy": 1.0, "idle": 3.0, "idle_fraction": 0.75},
            {"rank": 1, "busy": 2.0, "idle": 2.0, "idle_fraction": 0.5},
        ],
    }


def test_nothing_ran():
    nothing = Timeline("nothing", ((), ()))
    ElementTree.fromstring(to_svg(nothing))
    assert summary(nothing)["bubble"] == 0 and len(to_chrome_trace(nothing)["traceEvents"]) == 3
