"""DeepSpeed's engine, with its gaps closed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ds4d.comm import all_reduce


class ZeroEngine(DeepSpeedEngine):
    """DeepSpeed's engine, with its gaps on fp32 without ZeRO and on the CPU closed."""

    def _do_sanity_check(self):
        # torch computes fp16 on every CPU; DeepSpeed wants special instructions for it.
        accelerator = get_accelerator()
        if accelerator.device_name() == "cpu":
            accelerator.is_fp16_supported = lambda: True
        super()._do_sanity_check()

    def allreduce_no_retain(self, bucket, dp_group, *args, **kwargs):
        # Of one rank there is nothing to sum; DeepSpeed copies all gradients there and back.
        if dist.get_world_size(dp_group) > 1:
            super().allreduce_no_retain(bucket, dp_group, *args, **kwargs)

    def _take_model_step(self, lr_kwargs):
        # fp32 without ZeRO has no wrapper: no norm is kept and a non-finite step is taken.
        if self.optimizer is not self.basic_optimizer:
            return super()._take_model_step(lr_kwargs)
        norm = self._plain_grad_norm()
        self._global_grad_norm = norm
        self._step_applied = bool(torch.isfinite(norm))
        if self._step_applied:
            if self.gradient_clipping() > 0.0:
                groups = [p for p in self.module.parameters() if p.grad is not None]
                clip_grads_with_norm_(groups, self.gradient_clipping(), norm)
            self.optimizer.step()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        else:
            self.skipped_steps += 1
        self.zero_grad()
        self.global_steps += 1
        self.global_samples += self.train_batch_size()

    @torch.no_grad()
    def _plain_grad_norm(self) -> Tensor:
        """The L2 norm of the whole gradient, the same on every rank to the bit: of what is cut
        over tp the sum, of what all tp ranks hold the mean; a copy on another stage left out."""
        group = self.mpu.get_model_parallel_group()
        grads: dict[bool, list[Tensor]] = {True: [], False: []}
        for p in self.module.parameters():
            if p.grad is not None and not getattr(p, PIPE_REPLICATED, False):
                grads[is_model_parallel_parameter(p)].append(p.grad)
        sharded, replicated = (get_total_norm(g).double() ** 2 for g in grads.values())
        copies = self.mpu.get_tensor_model_parallel_world_size()
        squares = (sharded + replicated / copies).to(self.device)
        all_reduce(squares, group, purpose="gradient norm")
        return squares.sqrt().float()
