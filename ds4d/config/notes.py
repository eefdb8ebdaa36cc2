"""What a user should hear once: keys that have no effect in this run, and traps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from ds4d.config.draft import Draft
from ds4d.config.errors import show
from ds4d.config.layout import AXES, group_ranks, hosts_of_ranks
from ds4d.config.types import ParallelConfig
from ds4d.config.validate import default
from ds4d.pipeline.schedules import make_schedule


def _never(_draft: Draft) -> bool:
    return False


def _degree_above_1(axis: str) -> Callable[[Draft], bool]:
    return lambda draft: draft.degree(axis) > 1


# key -> (when it has an effect, why it has none otherwise)
WITHOUT_EFFECT = {
    **{
        f"ds4d.{key}": (_degree_above_1(axis), f"ds4d.parallel.{axis} is 1")
        for key, axis in {
            "pipeline.schedule": "pp",
            "pipeline.chunks": "pp",
            "pipeline.split": "pp",
            "monitor.timeline_step": "pp",
            "context.method": "cp",
            "context.ulysses_size": "cp",
            "parallel.tp_overlap": "tp",
        }.items()
    },
    "ds4d.parallel.sequence_parallel": (
        lambda draft: draft.degree("tp") > 1 or not draft.sequence_parallel,
        "ds4d.parallel.tp is 1",
    ),
    "ds4d.context.exchange": (
        lambda draft: draft.degree("cp") > 1 or draft.given("ds4d.context.exchange") == "p2p",
        "ds4d.parallel.cp is 1",
    ),
    "ds4d.checkpoint.async": (
        lambda draft: draft.given("ds4d.checkpoint.every") is not None,
        "the end waits for its checkpoint, and without ds4d.checkpoint.every there is no other",
    ),
    "zero_optimization.overlap_comm": (
        lambda draft: draft.degree("pp") == 1 or not draft.given("zero_optimization.overlap_comm"),
        "a pipeline reduces its gradients once, after the last backward pass",
    ),
    "flops_profiler.enabled": (
        lambda draft: draft.degree("pp") == 1,
        "DeepSpeed's profiler watches its own forward pass, which a pipeline does not use",
    ),
    "activation_checkpointing": (
        lambda draft: draft.get("ds4d.recompute") != "none",
        "ds4d.recompute is none",
    ),
    "compile": (_never, "ds4d does not compile the model"),
    "aio": (_never, "nothing is offloaded to NVMe"),
    "steps_per_print": (_never, "ds4d prints every step"),
    "dataloader_drop_last": (_never, "ds4d feeds the data itself"),
    "vocabulary_size": (_never, "the model's config has it"),
    "seq_parallel_communication_data_type": (_never, "see communication_data_type"),
    "zero_allow_untested_optimizer": (_never, "ds4d sets it"),
    "zero_force_ds_cpu_optimizer": (_never, "ds4d sets it"),
    "zero_optimization.elastic_checkpoint": (_never, "ds4d writes its own checkpoints"),
    "zero_optimization.load_from_fp32_weights": (_never, "ds4d writes its own checkpoints"),
    "optimizer.params.torch_adam": (_never, "ds4d always takes torch's kernel"),
    **{
        f"activation_checkpointing.{key}": (_never, "ds4d recomputes through the model itself")
        for key in (
            "partition_activations",
            "number_checkpoints",
            "contiguous_memory_optimization",
            "synchronize_checkpoint_boundary",
            "profile",
            "cpu_checkpointing",
        )
    },
}

# zero_optimization keys that DeepSpeed reads in some stages only; stage3_* is for stage 3
STAGES_OF_KEYS = {
    "round_robin_gradients": (1, 2),
    "parameter_alignment": (1, 2),
    "allgather_partitions": (1, 2),
    "use_multi_rank_bucket_allreduce": (1, 2),
    "ignore_unused_parameters": (2,),
    "sub_group_size": (3,),
    "memory_efficient_linear": (3,),
    "override_module_apply": (3,),
    "zero_hpz_partition_size": (3,),
    "zero_quantized_weights": (3,),
    "zero_quantized_nontrainable_weights": (3,),
    "zero_quantized_gradients": (3,),
    "leaf_module": (3,),
}

# source type -> the keys that it does not read
UNREAD_BY_SOURCE = {
    "text": ("field", "name", "split"),
    "jsonl": ("name", "split"),
    "parquet": ("name", "split"),
    "hf": (),
    "tokens": ("field", "name", "split"),
    "python_stdlib": ("path", "field", "name", "split"),
}


def find_notes(draft: Draft) -> Iterator[str]:
    """Notes on a resolved file; values equal to the default need none."""
    for key, (has_effect, why) in WITHOUT_EFFECT.items():
        if _is_set(draft, key) and not has_effect(draft):
            yield f"{key} has no effect: {why}"
    if draft.hosts:
        parallel = ParallelConfig(**{axis: draft.degree(axis) for axis in AXES})
        if note := matrices_over_hosts(parallel, draft.hosts):
            yield note
    yield from _zero_keys(draft)
    yield from _idle_pipeline(draft)
    yield from _timeline_too_late(draft)
    yield from _source_keys(draft)
    yield from _peak_of_warmup(draft)
    if draft.model.get("output_router_logits"):
        yield (
            "output_router_logits: the loss of the routers is that of the whole global batch, for "
            "which each step makes its forward passes twice: about a third more time"
        )
    if draft.zero_stage == 0 and draft.param_dtype != "fp32":
        yield (
            f"{draft.param_dtype} with zero_optimization.stage 0 runs DeepSpeed's stage 1, whose "
            "numbers are those of fp32 accumulation and a scaled loss: its stage 0 has neither"
        )
    if draft.given("zero_optimization.memory_efficient_linear"):
        if draft.get("ds4d.recompute") == "selective":
            yield (
                "zero_optimization.memory_efficient_linear has no effect: ds4d.recompute is "
                "selective, which keeps the products that it would change"
            )
    if draft.given("bf16.bf16_master_weights_and_grads"):
        yield "bf16.bf16_master_weights_and_grads: there is no fp32 copy of weights and moments"


def _is_set(draft: Draft, key: str) -> bool:
    return draft.given(key) not in (None, default(key))


def matrices_over_hosts(parallel: ParallelConfig, hosts: Mapping[str, int]) -> str | None:
    """Where a tp group has ranks on several hosts: what tp sends is needed at once, several times
    a layer. None: no group has.

    Args:
        hosts: names with the number of ranks on each, in the order of ranks.
    """
    for ranks in group_ranks("tp", parallel):
        its = hosts_of_ranks(ranks, hosts)
        if len(its) > 1:
            fits = math.gcd(parallel.tp, *hosts.values())
            return (
                f"ds4d.parallel.tp {parallel.tp}: ranks {ranks[0]} to {ranks[-1]} would share "
                f"matrices over the network between {' and '.join(its)}, and wait for it several "
                f"times a layer; with tp {fits} every group is inside a host"
            )
    return None


def _zero_keys(draft: Draft) -> Iterator[str]:
    stage = draft.zero_stage
    for key in draft.given("zero_optimization") or {}:
        stages = (3,) if key.startswith("stage3_") else STAGES_OF_KEYS.get(key, (stage,))
        if stage not in stages and _is_set(draft, f"zero_optimization.{key}"):
            names = " and ".join(map(str, stages))
            yield f"zero_optimization.{key} has no effect: it is for stage {names}, this is {stage}"


def _idle_pipeline(draft: Draft) -> Iterator[str]:
    pp, micro_batches = draft.degree("pp"), draft.batch.accumulation
    if micro_batches >= pp:
        return
    from ds4d.pipeline.simulate import simulate

    name, chunks = draft.get("ds4d.pipeline.schedule"), draft.placement.chunks
    schedule = make_schedule(name, ranks=pp, chunks=chunks, micro_batches=micro_batches)
    bubble = simulate(schedule).timeline.bubble
    yield (
        f"gradient_accumulation_steps {micro_batches} is less than ds4d.parallel.pp {pp}: too few "
        f"micro-batches to keep the pipeline busy, its ranks would be idle for {bubble:.0%} of a "
        "step"
    )


def _timeline_too_late(draft: Draft) -> Iterator[str]:
    step, steps = draft.given("ds4d.monitor.timeline_step"), draft.given("ds4d.training.steps")
    if draft.degree("pp") > 1 and step and steps and step > steps:
        yield f"ds4d.monitor.timeline_step {step} has no effect: ds4d.training.steps is {steps}"


def _source_keys(draft: Draft) -> Iterator[str]:
    for source in draft.present("ds4d.data.train", "ds4d.data.eval"):
        kind = draft.given(f"{source}.type")
        for name in UNREAD_BY_SOURCE[kind]:
            if _is_set(draft, f"{source}.{name}"):
                yield f"{source}.{name} has no effect: source type {kind} does not read it"


def _peak_of_warmup(draft: Draft) -> Iterator[str]:
    """DeepSpeed's warm-up schedules replace the optimizer's lr by their own."""
    peak, lr = draft.given("scheduler.params.warmup_max_lr"), draft.given("optimizer.params.lr")
    if peak is not None and peak != lr:
        yield (
            f"scheduler.params.warmup_max_lr {show(peak)} takes the place of "
            f"optimizer.params.lr {show(lr)}"
        )
