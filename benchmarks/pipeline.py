"""What a pipeline of two ranks costs and gains against one plain process, in one run.

    python -m benchmarks.pipeline [--micro-batches 4] [--only REGEX] [--rounds 6] [--json]

Two gloo ranks, one thread each; model of ``benchmarks.overhead``. All cut the model at the same
layers: as evenly as can be, the head being worth about one and a half of them. All clip the
gradient and use torch's fused AdamW; not the same is that DeepSpeed's ZeRO-1 keeps another, flat
copy of the weights and updates that, and that its ZeRO-0 clips by a wrong norm. The loss of the
first steps is compared with the plain process's.

CPU seconds are summed over both ranks; those over the plain process's are communication,
bookkeeping and what a schedule computes twice. Wall seconds, and the idle share of both ranks'
time, need a machine with nobody else on it.

Of ds4d's schedules the idle share between the first and the last pass is measured too, in turns of
their own, beside what the simulator says of the same schedule with the mean costs of the same step.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from functools import partial

from rich.console import Console
from rich.table import Table
from torch.distributed.pipelining import schedules as torch_schedules

from benchmarks.overhead import ds4d
from benchmarks.pipeline_peers import Cut, deepspeed_pipeline, torch_pipeline
from benchmarks.tensor_parallel import PLAIN, batches, plain
from benchmarks.turns import RANKS, Step, Turn, arguments, measure

FLAT = Cut(layers=(5, 3), ranks=(0, 1))
LOOP = Cut(layers=(3, 2, 2, 1), ranks=(0, 1, 0, 1))
LONG_LOOP = Cut(layers=(1,) * 8, ranks=(0, 1) * 4)
VEE = Cut(layers=(2, 2, 2, 2), ranks=(0, 1, 1, 0))
TORCH = {
    "GPipe": ("ScheduleGPipe", FLAT),
    "1F1B": ("Schedule1F1B", FLAT),
    "interleaved 1F1B": ("ScheduleInterleaved1F1B", LOOP),
    "interleaved 1F1B, 4 chunks": ("ScheduleInterleaved1F1B", LONG_LOOP),
    "interleaved zero bubble": ("ScheduleInterleavedZeroBubble", LOOP),
    "ZBV": ("ScheduleZBVZeroBubble", VEE),
    "DualPipeV": ("ScheduleDualPipeV", VEE),
}
DEEPSPEED = {
    "1F1B, ZeRO-0": (0, "PipelineModule", FLAT),
    "1F1B, ZeRO-1": (1, "PipelineModule", FLAT),
    "DualPipeV, ZeRO-1": (1, "DualPipeVModule", VEE),
}
DS4D = {
    "gpipe": ({"schedule": "gpipe"}, FLAT),
    "1f1b": ({"schedule": "1f1b"}, FLAT),
    "interleaved": ({"schedule": "interleaved", "chunks": 2}, LOOP),
    "interleaved, 4 chunks": ({"schedule": "interleaved", "chunks": 4}, LONG_LOOP),
    "dualpipev": ({"schedule": "dualpipev"}, VEE),
    "zb-h1": ({"schedule": "zb-h1"}, FLAT),
    "zbv": ({"schedule": "zbv"}, VEE),
}
COMPARED_STEPS = 3


def everybody(only: str, num_micro_batches: int) -> dict[str, Step]:
    """Those whose name matches, and the plain process."""
    import deepspeed.pipe

    makers: dict[str, Callable[[], Step]] = {}
    for name, (schedule, cut) in TORCH.items():
        kind = getattr(torch_schedules, schedule)
        makers[f"torch {name}"] = partial(torch_pipeline, kind, cut, num_micro_batches)
    for name, (zero, module, cut) in DEEPSPEED.items():
        kind = getattr(deepspeed.pipe, module)
        makers[f"DeepSpeed {name}"] = partial(
            deepspeed_pipeline, zero, kind, cut, num_micro_batches
        )
    makers |= our_makers(num_micro_batches)
    chosen = {name: make() for name, make in makers.items() if re.search(only, name)}
    return {PLAIN: plain(fused=True), **chosen}


def our_makers(num_micro_batches: int, *, record: bool = False) -> dict[str, Callable[[], Step]]:
    return {
        f"ds4d {name}": partial(
            ds4d,
            0,
            sequences=num_micro_batches,
            pipeline={**keys, "split": list(cut.layers)},
            record=record,
            pp=RANKS,
        )
        for name, (keys, cut) in DS4D.items()
    }


def recorded(only: str, num_micro_batches: int) -> dict[str, Step]:
    """ds4d's among them; a step gives what its recorder has measured."""
    makers = our_makers(num_micro_batches, record=True)
    return {name: make() for name, make in makers.items() if re.search(only, name)}


def summary(name: str, turns: list[Turn], reference: list[Turn]) -> dict[str, object]:
    rounds = turns[1:]
    differences = [
        abs(ours - theirs)
        for turn, plain_turn in zip(turns, reference)
        for ours, theirs in zip(turn.results, plain_turn.results)
    ]
    return {
        "name": name,
        "cpu_seconds": statistics.median(turn.cpu_seconds for turn in rounds),
        "over_plain": statistics.median(
            turn.cpu_seconds / other.cpu_seconds for turn, other in zip(rounds, reference[1:])
        ),
        "wall_seconds_median": statistics.median(turn.wall_seconds for turn in rounds),
        "wall_seconds_best": min(turn.wall_seconds for turn in rounds),
        "idle": statistics.median(turn.idle for turn in rounds),
        "loss_difference": max(differences[:COMPARED_STEPS]),
    }


def idle(name: str, turns: list[Turn]) -> dict[str, object]:
    """Of ``recorded`` turns: medians over the steps."""
    steps = [measured for turn in turns[1:] for measured in turn.results]
    return {
        "name": name,
        "measured_idle": statistics.median(step.timeline.bubble for step in steps),
        "simulated_idle": statistics.median(step.simulated.bubble for step in steps),
    }


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--only", default="", help="contestants, a regular expression")
    args = parser.parse_args()
    turns, recorded_turns = (
        measure(
            partial(build, args.only, args.micro_batches),
            partial(batches, sequences=args.micro_batches),
            rounds=args.rounds,
            steps=args.steps,
            same_data=True,
        )
        for build in (everybody, recorded)
    )
    result = [summary(name, its, turns[PLAIN]) for name, its in turns.items()]
    idle_result = [idle(name, its) for name, its in recorded_turns.items()]
    if args.json:
        print(json.dumps({"steps": result, "idle": idle_result}, indent=2))
        return
    table = Table(
        "", "CPU s", "ratio", "wall s", "best", "idle", "loss",
        title=f"a step on pp {RANKS}, {args.micro_batches} micro-batches",
        caption=f"loss: how far from the plain process's, at most, in the first {COMPARED_STEPS}"
        " steps",
    )  # fmt: skip
    for row in result:
        seconds = ("cpu_seconds", "over_plain", "wall_seconds_median", "wall_seconds_best")
        cells = [f"{row[key]:.3f}" for key in seconds]
        table.add_row(row["name"], *cells, f"{row['idle']:.0%}", f"{row['loss_difference']:.0e}")
    Console().print(table)
    table = Table("", "measured", "simulated", title="idle from the first pass to the last")
    for row in idle_result:
        cells = (f"{row[key]:.1%}" for key in ("measured_idle", "simulated_idle"))
        table.add_row(row["name"], *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
