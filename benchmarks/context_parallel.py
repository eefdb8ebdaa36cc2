"""What context parallelism costs: CPU seconds a step over those of one plain process, in one run.

    python -m benchmarks.context_parallel [--seq-len 512 4096] [--rounds 6] [--steps 2] [--json]

Two gloo ranks, one thread each; model of ``benchmarks.overhead``, micro-batches of one sequence.
The work is the same for everyone, so a ratio over 1 is communication, what blocks of attention cost
over one call, and what both ranks do alike. One plain Hugging Face process is on rank 0 alone, with
the same fused AdamW. Contestants take turns in the same two processes, so that a busy machine slows
all alike; CPU time is summed over both ranks. The spread is how much more of it than the mean the
busier rank needs. Ratio and spread are medians over rounds. The losses of the first steps are
compared with the plain process's.
"""

from __future__ import annotations

import json
import statistics
from functools import partial

from rich.console import Console
from rich.table import Table

from benchmarks.overhead import ds4d
from benchmarks.tensor_parallel import PLAIN, batches, plain
from benchmarks.turns import RANKS, Step, Turn, arguments, measure

# sequence length -> sequences a step
SEQUENCES = {512: 4, 4096: 1}
CONTEXTS = {
    "ring": {"exchange": "p2p"},
    "ring, all at once": {"exchange": "all_gather"},
    "ulysses": {"method": "ulysses"},
}


def everybody(seq_len: int, sequences: int) -> dict[str, Step]:
    contestants = {PLAIN: plain(seq_len=seq_len, fused=True)}
    for name, context in CONTEXTS.items():
        contestants[f"ds4d, {name}"] = ds4d(
            0, sequences=sequences, seq_len=seq_len, context=context, cp=RANKS
        )
    return contestants


def summary(name: str, turns: list[Turn], reference: list[Turn]) -> dict[str, object]:
    rounds = turns[1:]
    return {
        "name": name,
        "cpu_seconds": statistics.median(turn.cpu_seconds for turn in rounds),
        "over_plain": statistics.median(
            turn.cpu_seconds / other.cpu_seconds for turn, other in zip(rounds, reference[1:])
        ),
        "spread": statistics.median(turn.spread for turn in rounds),
        "loss_difference": max(
            abs(a - b) for a, b in zip(turns[0].results, reference[0].results, strict=True)
        ),
    }


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--seq-len", type=int, nargs="+", default=list(SEQUENCES))
    args = parser.parse_args()
    result = {}
    for seq_len in args.seq_len:
        sequences = SEQUENCES.get(seq_len, 1)
        turns = measure(
            partial(everybody, seq_len, sequences),
            partial(batches, sequences=sequences, seq_len=seq_len),
            rounds=args.rounds,
            steps=args.steps,
            same_data=True,
        )
        result[seq_len] = [summary(name, its, turns[PLAIN]) for name, its in turns.items()]
    if args.json:
        print(json.dumps(result, indent=2))
        return
    for seq_len, rows in result.items():
        table = Table(
            "", "CPU s", "over plain", "spread", "loss", title=f"cp {RANKS}, {seq_len} tokens"
        )
        for row in rows:
            spread = "" if row["name"] == PLAIN else f"{row['spread']:.1%}"
            cells = (f"{row[key]:.3f}" for key in ("cpu_seconds", "over_plain"))
            table.add_row(row["name"], *cells, spread, f"{row['loss_difference']:.0e}")
        Console().print(table)


if __name__ == "__main__":
    main()
