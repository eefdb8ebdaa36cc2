"""What ds4d costs over raw loops: CPU seconds a step, all contestants in one run.

    python -m benchmarks.overhead [--rounds 6] [--steps 2] [--json]

Two gloo ranks, one thread each; the model of shared/peers.md section 1 (8.0 M parameters, sequence
512, 4 sequences a step, micro-batch 1, AdamW, fp32). Every contestant is built once in the same two
processes; then they take turns, so that a busy machine slows all alike. The figure is CPU time
summed over both ranks; the ratio is the median over the rounds of ds4d / peer.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.turns import RANKS as DP
from benchmarks.turns import Step, arguments, cpu_seconds

MODEL = {
    "model_type": "llama", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
SEQ_LEN, SEQUENCES, SEED = 512, 4, 0
ACCUMULATION = SEQUENCES // DP
OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}}
PAIRS = [("ds4d zero-0", "torch DDP")]
PAIRS += [(f"ds4d zero-{stage}", f"DeepSpeed zero-{stage}") for stage in (1, 2, 3)]


def plain_model(seq_len: int = SEQ_LEN, *, config: dict[str, Any] = MODEL) -> torch.nn.Module:
    """Hugging Face's, with the weights that ds4d draws."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from ds4d.model.initial import InitialValues
    from ds4d.model.meta import logical_model

    config = AutoConfig.for_model(**{**config, "max_position_embeddings": seq_len})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    weights = InitialValues(logical_model(config), seed=SEED)
    model.load_state_dict({name: weights(name) for name in model.state_dict()})
    return model


def torch_ddp() -> Step:
    """The loop that everybody writes first."""
    model = torch.nn.parallel.DistributedDataParallel(plain_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)

    def step(batches: list[torch.Tensor]) -> None:
        for index, ids in enumerate(batches):
            model.require_backward_grad_sync = index == len(batches) - 1
            (model(input_ids=ids, labels=ids, use_cache=False).loss / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def raw_deepspeed(stage: int, **keys) -> Step:
    """A bare DeepSpeed loop, as its getting-started page has it.

    Args:
        keys: of its config, besides those that everybody has.
    """
    import deepspeed
    from deepspeed.utils import groups

    groups.mpu = None  # of ds4d's engines
    model = plain_model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": ACCUMULATION,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage},
            "steps_per_print": 10**9,
            **keys,
        },
    )

    def step(batches: list[torch.Tensor]) -> None:
        for ids in batches:
            engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
            engine.step()

    return step


def ds4d(
    stage: int,
    *,
    sequences: int = SEQUENCES,
    seq_len: int = SEQ_LEN,
    config: dict[str, Any] = MODEL,
    pipeline: dict | None = None,
    context: dict | None = None,
    record: bool = False,
    **parallel,
) -> Step:
    """The same through ds4d's engine.

    Args:
        sequences: a step, over all ranks.
        seq_len: tokens of each.
        config: of the model.
        pipeline, context: ``ds4d.pipeline``, ``ds4d.context``.
        record: a step gives its ``recorder.Measured`` instead of its loss.
        parallel: ``ds4d.parallel``.
    """
    from ds4d import attention
    from ds4d.config.load import load
    from ds4d.data.batch import IGNORE, MicroBatch
    from ds4d.engine import Engine
    from ds4d.mesh import Mesh
    from ds4d.model.build import build_model
    from ds4d.model.config import hf_config
    from ds4d.optim import of_run
    from ds4d.pipeline.recorder import OFF, Recorder
    from ds4d.pipeline.stage import stage_cutter

    run = load(
        {
            "train_batch_size": sequences,
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": OPTIMIZER,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage},
            "ds4d": {
                "model": {"config": {**config, "max_position_embeddings": seq_len}},
                "data": {
                    "seq_len": seq_len,
                    "packing": "concat",
                    "tokenizer": {"vocab_size": config["vocab_size"]},
                    "train": {"type": "python_stdlib"},
                },
                "parallel": parallel,
                "pipeline": pipeline or {},
                "context": context or {},
                "training": {"steps": 1000},
            },
        },
        world_size=dist.get_world_size(),
    )
    mesh = Mesh.create(run.parallel, run.context)
    model_config = hf_config(run.model)

    def build(partition):
        return build_model(
            run.model,
            config=model_config,
            dtype=torch.float32,
            device="cpu",
            seed=SEED,
            attn_implementation=attention.register(),
            partition=partition,
            tp=mesh.tensor_parallel(),
            cp=mesh.context_parallel(run.context),
            cut=stage_cutter(run, mesh, model_config),
        )

    device = torch.device("cpu")
    engine = Engine.create(run, mesh, build, device=device, **of_run(run, total_steps=1000))
    positions = torch.arange(seq_len)[None]
    last = torch.full((1, 1), IGNORE)

    def step(batches: list[torch.Tensor]) -> Any:
        recorder = Recorder.on(device, mesh.group("pp")) if record else OFF
        whole = [MicroBatch(ids, torch.cat([ids[:, 1:], last], 1), positions) for ids in batches]
        result = engine.train_step([mesh.cutter(batch) for batch in whole], recorder=recorder)
        return recorder.measured() if record else result.loss

    return step


def everybody() -> dict[str, Step]:
    contestants: dict[str, Step] = {"torch DDP": torch_ddp(), "ds4d zero-0": ds4d(0)}
    for stage in (1, 2, 3):
        contestants[f"DeepSpeed zero-{stage}"] = raw_deepspeed(stage)
        contestants[f"ds4d zero-{stage}"] = ds4d(stage)
    return contestants


def batches(generator: torch.Generator) -> list[torch.Tensor]:
    return [torch.randint(4096, (1, SEQ_LEN), generator=generator) for _ in range(ACCUMULATION)]


def main() -> None:
    args = arguments(__doc__.splitlines()[0]).parse_args()
    seconds = cpu_seconds(
        everybody, batches, rounds=args.rounds, steps=args.steps, same_data=False
    )
    result = [
        {
            "peer": peer,
            "peer_cpu_seconds": statistics.median(seconds[peer]),
            "ds4d_cpu_seconds": statistics.median(seconds[ours]),
            "ratio": statistics.median(a / b for a, b in zip(seconds[ours], seconds[peer])),
        }
        for ours, peer in PAIRS
    ]
    if args.json:
        print(json.dumps(result, indent=2))
        return
    table = Table("peer", "CPU s a step", "ds4d", "ratio", title="CPU seconds a step, 2 ranks")
    for row in result:
        cells = [row["peer_cpu_seconds"], row["ds4d_cpu_seconds"], row["ratio"]]
        table.add_row(row["peer"], *(f"{cell:.3f}" for cell in cells))
    Console().print(table)


if __name__ == "__main__":
    main()
