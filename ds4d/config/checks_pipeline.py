"""What is wrong with a pipeline (``ds4d.parallel.pp`` > 1): its schedule, its stages, its ZeRO."""

from __future__ import annotations

from ds4d.config.batch import ACCUMULATION, MICRO, TRAIN, Unsolvable
from ds4d.config.draft import Draft
from ds4d.config.errors import Problem
from ds4d.config.rules import Problems, rule
from ds4d.pipeline.actions import Placement
from ds4d.pipeline.schedules import make_schedule

PP, PIPELINE = "ds4d.parallel.pp", "ds4d.pipeline"
SCHEDULE, CHUNKS, SPLIT = (f"{PIPELINE}.{key}" for key in ("schedule", "chunks", "split"))
LAYOUT = ("ds4d.parallel", PIPELINE, TRAIN, MICRO, ACCUMULATION)


@rule(PP, "zero_optimization.stage")
def zero_fits_the_pipeline(draft: Draft) -> Problems:
    stage, pp = draft.zero_stage, draft.degree("pp")
    if stage >= 2 and pp > 1:
        yield Problem(
            "zero_optimization.stage",
            f"{stage} cannot go with {PP} {pp}: a pipeline keeps the gradients of all its "
            "micro-batches, which ZeRO 2 and 3 split; set zero_optimization.stage to 0 or 1 (where "
            f"memory is short, a larger ds4d.parallel.tp shares out gradients too), or {PP} to 1",
        )


@rule(PP, "zero_optimization.offload_optimizer")
def optimizer_stays_on_the_device(draft: Draft) -> Problems:
    """DeepSpeed's offloading collects gradients in backward hooks, which pipelines do not use."""
    device = draft.number("zero_optimization.offload_optimizer.device") or "none"
    if device != "none" and draft.degree("pp") > 1:
        yield Problem(
            "zero_optimization.offload_optimizer",
            f"cannot go with {PP} {draft.degree('pp')}: the gradients of a pipeline stay on the "
            f"device until its last backward; leave it out, or set {PP} to 1",
        )


@rule(PP, "torch_autocast")
def half_precision_without_autocast(draft: Draft) -> Problems:
    """DeepSpeed begins autocast in its own forward pass, which pipelines do not use."""
    if draft.get("torch_autocast.enabled") and draft.degree("pp") > 1:
        yield Problem(
            "torch_autocast.enabled",
            f"true cannot go with {PP} {draft.degree('pp')}: stages run without DeepSpeed's "
            "autocast, in fp32; set bf16.enabled instead, which keeps fp32 weights, or leave it out",
        )


@rule(PP, SCHEDULE, CHUNKS)
def chunks_fit_the_schedule(draft: Draft) -> Problems:
    if draft.degree("pp") == 1:
        return
    schedule, chunks = draft.get(SCHEDULE), draft.get(CHUNKS)
    if schedule == "interleaved" and chunks == 1:
        yield Problem(CHUNKS, f'1: {SCHEDULE} "interleaved" needs 2 or more; 1 chunk is "1f1b"')
    try:
        draft.placement
    except ValueError as error:
        yield Problem(CHUNKS, str(error).removeprefix(f"{CHUNKS} "))


@rule("ds4d.model", PP)
def model_can_be_staged(draft: Draft) -> Problems:
    if draft.degree("pp") > 1 and (reason := draft.why_not_pp):
        yield Problem(PP, reason)


@rule("ds4d.model", PP, SCHEDULE, CHUNKS)
def every_stage_has_a_layer(draft: Draft) -> Problems:
    placement, layers = _placement(draft), draft.model.get("num_hidden_layers")
    if placement is None or layers is None or placement.stages <= layers:
        return
    pp, chunks = placement.ranks, placement.chunks
    fixes = []
    if chunks == 1 or layers // chunks > 1:
        fixes.append(f"{PP} can be {layers // chunks} at most")
    if draft.get(SCHEDULE) == "interleaved" and layers // pp > 1:
        fixes.append(f"{CHUNKS} can be {layers // pp} at most")
    if not fixes:
        fixes.append(f'with {SCHEDULE} "1f1b", {PP} can be {layers} at most')
    product = f"{pp}" if chunks == 1 else f"{pp} x {CHUNKS} {chunks} = {placement.stages}"
    yield Problem(
        PP,
        f"{product} stages for num_hidden_layers {layers} would leave some empty; "
        f"{', or '.join(fixes)}",
    )


@rule("ds4d.model", "ds4d.data", "ds4d.recompute", *LAYOUT)
def split_fits_the_model(draft: Draft) -> Problems:
    placement, layers = _placement(draft), draft.model.get("num_hidden_layers")
    if draft.given(SPLIT) is None or placement is None or layers is None:
        return
    if placement.stages > layers:
        return  # said by every_stage_has_a_layer
    try:
        draft.split
    except Unsolvable:
        return  # said by batch_words_fit
    except ValueError as error:
        yield Problem(SPLIT, str(error))


@rule(*LAYOUT)
def micro_batches_fill_the_schedule(draft: Draft) -> Problems:
    placement = _placement(draft)
    if placement is None:
        return
    try:
        micro_batches = draft.batch.accumulation
    except Unsolvable:
        return  # said by batch_words_fit
    try:
        make_schedule(
            draft.get(SCHEDULE),
            ranks=placement.ranks,
            chunks=placement.chunks,
            micro_batches=micro_batches,
        )
    except ValueError as error:
        yield Problem(ACCUMULATION, str(error).removeprefix(f"{ACCUMULATION} "))


def _placement(draft: Draft) -> Placement | None:
    """Where the virtual stages are; None: nowhere, or ``chunks_fit_the_schedule`` says why not."""
    try:
        return draft.placement if draft.degree("pp") > 1 else None
    except ValueError:
        return None
