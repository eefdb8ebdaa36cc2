"""When each pass of a step ran on each pipeline rank, simulated or measured alike; as numbers, as a
picture and as a trace for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree as xml
from xml.etree.ElementTree import Element

from ds4d.pipeline.actions import Kind, Span


@dataclass(frozen=True)
class Timeline:
    """Attributes:
    title: what ran.
    lanes: of each rank, its passes in the order of time; they do not overlap.
    unit: of time.
    """

    title: str
    lanes: tuple[tuple[Span, ...], ...]
    unit: str = "seconds"

    @property
    def start(self) -> float:
        return min((lane[0].start for lane in self.lanes if lane), default=0.0)

    @property
    def length(self) -> float:
        """From the first pass on any rank to the end of the last."""
        return max((lane[-1].end for lane in self.lanes if lane), default=0.0) - self.start

    @property
    def busy(self) -> tuple[float, ...]:
        """Of each rank."""
        return tuple(sum(span.end - span.start for span in lane) for lane in self.lanes)

    @property
    def idle(self) -> tuple[float, ...]:
        """Of each rank: the rest of the length."""
        length = self.length
        return tuple(length - busy for busy in self.busy)

    @property
    def idle_fraction(self) -> tuple[float, ...]:
        """Of each rank."""
        length = self.length
        return tuple(idle / length if length else 0.0 for idle in self.idle)

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time that is idle."""
        return sum(self.idle_fraction) / len(self.lanes)


def summary(timeline: Timeline) -> dict[str, Any]:
    """For programs. ``bubble`` is of all ranks, a fraction of their time."""
    of_ranks = zip(timeline.busy, timeline.idle, timeline.idle_fraction, strict=True)
    return {
        "title": timeline.title,
        "unit": timeline.unit,
        "length": timeline.length,
        "bubble": timeline.bubble,
        "ranks": [
            {"rank": rank, "busy": busy, "idle": idle, "idle_fraction": fraction}
            for rank, (busy, idle, fraction) in enumerate(of_ranks)
        ],
    }


def to_chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The Trace Event Format, to be written as JSON: a thread a rank. A unit of the timeline that
    is not seconds is shown as one."""
    names = [("process_name", 0, timeline.title)]
    names += [("thread_name", rank, f"rank {rank}") for rank in range(len(timeline.lanes))]
    events = [
        {"ph": "M", "name": name, "pid": 0, "tid": rank, "args": {"name": value}}
        for name, rank, value in names
    ]
    events += [
        {
            "ph": "X",
            "name": str(action),
            "cat": LOOKS[action.kind].name,
            "pid": 0,
            "tid": rank,
            "ts": start * 1e6,
            "dur": (end - start) * 1e6,
            "args": {"chunk": action.chunk, "micro_batch": action.micro_batch},
        }
        for rank, lane in enumerate(timeline.lanes)
        for action, start, end in lane
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


# -- the picture ------------------------------------------------------------------------------


class Look(NamedTuple):
    name: str
    rgb: tuple[int, int, int]  # of chunk 0; later chunks are paler


LOOKS = {
    Kind.FORWARD: Look("forward", (92, 150, 232)),
    Kind.BACKWARD: Look("backward", (64, 168, 112)),
    Kind.INPUT: Look("backward of inputs", (38, 176, 180)),
    Kind.WEIGHT: Look("backward of weights", (236, 150, 60)),
}
IDLE = "#e9e9e9"
PALEST = 0.65  # of the way to white
# pixels: the lanes are CHART wide, with LEFT, RIGHT, TOP and BOTTOM around them
CHART, LEFT, RIGHT, TOP, BOTTOM = 1200, 64, 60, 44, 72
LANE, GAP, DIGIT = 22, 5, 7
BASELINE = 15  # of a lane's text, from the lane's top
TICKS = 10  # of the axis, about


def to_svg(timeline: Timeline) -> str:
    """A lane a rank; a rectangle a pass, with its micro-batch where that fits; grey is idle, and
    how much of the time that is stands behind the lane."""
    chunks = 1 + max((span.action.chunk for lane in timeline.lanes for span in lane), default=0)
    bottom = TOP + len(timeline.lanes) * (LANE + GAP)
    width, height = LEFT + CHART + RIGHT, bottom + BOTTOM
    root = xml.Element("svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width} {height}")
    root.attrib |= {"font-family": "sans-serif", "font-size": "11"}
    _rect(root, 0, 0, width, height, fill="#ffffff")
    _text(root, timeline.title, LEFT, 18).set("font-size", "14")
    _text(root, "idle", LEFT + CHART + 8, TOP - GAP)
    for rank, (lane, idle) in enumerate(zip(timeline.lanes, timeline.idle_fraction, strict=True)):
        top = TOP + rank * (LANE + GAP)
        group = xml.SubElement(root, "g", {"class": "lane"})
        _text(group, f"rank {rank}", LEFT - 8, top + BASELINE, anchor="end")
        _text(group, f"{idle:.1%}", LEFT + CHART + 8, top + BASELINE)
        _rect(group, LEFT, top, CHART, LANE, fill=IDLE)
        for span in lane:
            _pass(group, span, timeline, top, chunks)
    _axis(root, timeline, bottom)
    _legend(root, timeline, bottom + 44, chunks)
    return xml.tostring(root, encoding="unicode")


def _pass(group: Element, span: Span, timeline: Timeline, top: float, chunks: int) -> None:
    action, start, end = span
    scale = CHART / (timeline.length or 1.0)
    left, width = LEFT + (start - timeline.start) * scale, (end - start) * scale
    rect = _rect(group, left, top, width, LANE, fill=_colour(action.kind, action.chunk, chunks))
    rect.attrib |= {"class": "pass", "stroke": "#ffffff", "stroke-width": "0.5"}
    xml.SubElement(rect, "title").text = (
        f"{LOOKS[action.kind].name} of micro-batch {action.micro_batch}, chunk {action.chunk}: "
        f"{start:.6g} to {end:.6g} {timeline.unit}"
    )
    number = str(action.micro_batch)
    if width > DIGIT * len(number):
        _text(group, number, left + width / 2, top + BASELINE, anchor="middle")


def _axis(root: Element, timeline: Timeline, top: float) -> None:
    """Marks at round numbers, from the first pass on."""
    length = timeline.length or 1.0
    power = 10.0 ** math.floor(math.log10(length / TICKS))
    step = next(power * times for times in (1, 2, 5, 10) if power * times * TICKS >= length)
    for tick in range(math.floor(length / step) + 1):
        x = LEFT + tick * step / length * CHART
        _rect(root, x - 0.5, top, 1, 4, fill="#555555")
        _text(root, f"{tick * step:.6g}", x, top + 17, anchor="middle")
    _text(root, timeline.unit, LEFT + CHART, top + 34, anchor="end")


def _legend(root: Element, timeline: Timeline, top: float, chunks: int) -> None:
    used = {span.action.kind for lane in timeline.lanes for span in lane}
    paler = f", chunk 0 to {chunks - 1}" if chunks > 1 else ""
    entries = [
        (f"{look.name}{paler}", [_colour(kind, chunk, chunks) for chunk in range(chunks)])
        for kind, look in LOOKS.items()
        if kind in used
    ]
    x = float(LEFT)
    for name, fills in [*entries, ("idle", [IDLE])]:
        for fill in fills:
            _rect(root, x, top, 14, 14, fill=fill)
            x += 15
        _text(root, name, x + 4, top + 11)
        x += DIGIT * len(name) + 24


def _colour(kind: Kind, chunk: int, chunks: int) -> str:
    paler = PALEST * chunk / max(chunks - 1, 1)
    return "#" + "".join(f"{round(c + (255 - c) * paler):02x}" for c in LOOKS[kind].rgb)


def _rect(
    parent: Element, x: float, y: float, width: float, height: float, *, fill: str
) -> Element:
    box = {"x": f"{x:.3f}", "y": f"{y:g}", "width": f"{width:.3f}", "height": f"{height:g}"}
    return xml.SubElement(parent, "rect", box, fill=fill)


def _text(parent: Element, text: str, x: float, y: float, *, anchor: str = "start") -> Element:
    where = {"x": f"{x:.2f}", "y": f"{y:g}", "text-anchor": anchor}
    element = xml.SubElement(parent, "text", where)
    element.text = text
    return element


# -- files -------------------------------------------------------------------------------------

# What a timeline is written as, by the file's suffix.
WRITERS: dict[str, Callable[[Timeline], str]] = {
    ".svg": to_svg,
    ".json": lambda timeline: json.dumps(to_chrome_trace(timeline)),
}


def write(timeline: Timeline, file: Path) -> None:
    """As the file's suffix says."""
    file.write_text(WRITERS[file.suffix](timeline), encoding="utf-8")
