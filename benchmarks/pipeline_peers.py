"""The pipelines of torch and DeepSpeed, over the parts of one Hugging Face Llama.

Both get the same stages: plain sequences of HF's own modules, whose rotary tables, the same for
every sequence, are computed once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from benchmarks.overhead import SEQ_LEN, plain_model
from benchmarks.turns import RANKS, Step


@dataclass(frozen=True)
class Cut:
    """Attributes:
    layers: how many each virtual stage has; the last has the head too.
    ranks: where each is.
    """

    layers: tuple[int, ...]
    ranks: tuple[int, ...]

    def stages(self, model: nn.Module) -> list[nn.Module]:
        """All of them, on every rank."""
        positions = torch.arange(SEQ_LEN)[None]
        rotary = model.model.rotary_emb(torch.zeros(1), position_ids=positions)
        layers = iter([Layer(layer, rotary) for layer in model.model.layers])
        parts = [list(islice(layers, count)) for count in self.layers]
        parts[0].insert(0, model.model.embed_tokens)
        parts[-1] += [model.model.norm, model.lm_head]
        return [nn.Sequential(*part) for part in parts]


class Layer(nn.Module):
    """A decoder layer that needs hidden states only."""

    def __init__(self, layer: nn.Module, rotary: tuple[torch.Tensor, torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.layer(hidden, position_embeddings=self.rotary)


def _loss(model: nn.Module):
    return lambda logits, labels: model.loss_function(logits, labels, model.config.vocab_size)


def _adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0, fused=True)


def torch_pipeline(schedule_class: type, cut: Cut, num_micro_batches: int) -> Step:
    """torch.distributed.pipelining, with the clipping over stages that it leaves to its user."""
    model, rank = plain_model(), dist.get_rank()
    stages = [
        PipelineStage(module, index, len(cut.layers), torch.device("cpu"))
        for index, module in enumerate(cut.stages(model))
        if cut.ranks[index] == rank
    ]
    single = issubclass(schedule_class, PipelineScheduleSingle)
    schedule = schedule_class(
        stages[0] if single else stages, n_microbatches=num_micro_batches, loss_fn=_loss(model)
    )
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = _adamw(parameters)
    is_first, is_last = cut.ranks[0] == rank, cut.ranks[-1] == rank

    def step(batches: list[torch.Tensor]) -> float:
        ids, losses = torch.cat(batches), []
        schedule.step(
            *([ids] if is_first else []),
            target=ids if is_last else None,
            losses=losses,
            return_outputs=False,
        )
        norm = get_total_norm(p.grad for p in parameters)
        sums = torch.tensor([norm**2, sum(map(float, losses))])
        dist.all_reduce(sums)
        clip_grads_with_norm_(parameters, 1.0, sums[0].sqrt())
        optimizer.step()
        optimizer.zero_grad()
        return sums[1].item() / num_micro_batches

    return step


def deepspeed_pipeline(
    zero_stage: int, module_class: type, cut: Cut, num_micro_batches: int
) -> Step:
    """DeepSpeed's PipelineEngine, or DualPipeVEngine.

    Args:
        zero_stage: with 0 and fp32, DeepSpeed clips by the norm of the first pipeline stage alone.
        module_class: DeepSpeed's ``PipelineModule`` or ``DualPipeVModule``.
    """
    import deepspeed
    from deepspeed.utils import groups

    groups.mpu = None  # of other engines
    model = plain_model()
    module = module_class(
        cut.stages(model),
        num_stages=RANKS,
        loss_fn=_loss(model),
        partition_method="uniform",  # of items that are whole stages
    )
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=_adamw(module.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": num_micro_batches,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": zero_stage},
            "steps_per_print": 10**9,
        },
    )

    def step(batches: list[torch.Tensor]) -> float:
        return engine.train_batch(iter([(ids, ids) for ids in batches])).item()

    return step
