"""A rank for ``test_pp_failure.py``: a step of a pipeline in which a layer raises, in the frame of
run_rank. Arguments: the run folder, the model's folder, ranks, layer, micro-batch, pass."""

from __future__ import annotations

import sys
from pathlib import Path

from ds4d.launch import runtime


def body(rank: runtime.Rank) -> int:
    from ds4d.pipeline.stage import StandIn
    from tests.parity import make_engine, make_run
    from tests.reference import samples

    folder, ranks, layer, micro_batch, where = sys.argv[2:]
    rank.init_distributed(60)
    engine, _ = make_engine(make_run(folder, pp=int(ranks), rows=8))

    def stumble(*_):
        (rank.output / "stumbled").touch()
        raise ArithmeticError(f"layer {layer} stumbles in its {where} pass")

    calls = []

    def hook(_layer, _args, output):
        calls.append(output)
        if len(calls) - 1 == int(micro_batch):
            stumble() if where == "forward" else output.register_hook(stumble)

    held = engine.module.model.layers[int(layer)]
    if not isinstance(held, StandIn):
        held.register_forward_hook(hook)
    engine.train_step([samples(1) for _ in range(8)])
    return 0


if __name__ == "__main__":
    sys.exit(runtime.run_rank(body, output=Path(sys.argv[1])))
