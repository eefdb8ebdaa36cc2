"""The model that a script gets for its own.

``model(**batch)`` in training is one micro-batch of an optimizer step. Its loss is the mean over
the valid targets of this micro-batch on all ranks; the gradients that ``backward`` leaves are those
of the mean over all targets of the step, however unequal the micro-batches are.

Without a pipeline a call runs forward, and ``backward`` runs backward. With one, the first call of
a step runs the whole schedule, forward and backward, of all micro-batches of the step; each call
then gives the loss of its own, and ``backward`` only notes what the script multiplied it by.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds4d.accelerate.batch import LABELS, SHIFTED, micro_batch, refused
from ds4d.accelerate.calls import Call, Work, recognise
from ds4d.accelerate.gathered import gather_sequence
from ds4d.accelerate.loader import ScriptLoader
from ds4d.accelerate.output import Output, Recorded, Shown, Weighted, anchor
from ds4d.accelerate.run import ScriptRun
from ds4d.attention import supports
from ds4d.data.batch import MicroBatch
from ds4d.loss import whole_logits

Items = Tensor | int | float | None
PIPELINED = (
    "ds4d.parallel.pp {pp}: in training the model is called with labels, for the pipeline computes "
    "the loss on its last stage and goes back at once; a loss of the script's own on logits needs "
    "pp 1"
)
BEAMS = (
    "ds4d.pipeline.schedule {schedule}: each rank has several chunks, each with a KV cache, and "
    "num_beams {beams} would let texts change places in one of them; search without beams, or "
    'use schedule "1f1b"'
)
SEVERAL_CHUNKS = ("interleaved", "dualpipev", "zbv")


class ScriptModel(nn.Module):
    """Args:
    module: the script's own; ds4d makes it this rank's part when the run begins.
    begin: begins the run, once: collective over the world.
    loaders: that the script's batches come from.
    """

    def __init__(
        self,
        module: nn.Module,
        begin: Callable[[], ScriptRun],
        loaders: Sequence[ScriptLoader],
    ) -> None:
        super().__init__()
        self.module = module
        self._begin, self._loaders = begin, loaders
        self._parameters_of_call = inspect.signature(type(module).forward).parameters
        self.open: Call | None = None  # the last call in training

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    # -- calls ------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Output:
        """As the model's own forward, of which ds4d knows tokens, masks, positions and labels.

        Returns:
            ``loss`` where labels are given, and ``logits``: [B, S, V], whole on every rank,
            computed when they are asked for, by all ranks alike.

        Raises:
            ValueError: what can't be right, by name.

        Collective: the world.
        """
        run = self._begin()
        inputs = self._named(args, kwargs)
        training = self.module.training
        call = recognise(inputs, self._loaders, training=training)
        # scripts that never call model.train() learn all the same; a pipeline has to know
        may_learn = run.config.parallel.pp == 1 and run.engine is not None
        learns = torch.is_grad_enabled() and (training or may_learn)
        run.set_training(self.module.training)
        has_labels = any(inputs.get(name) is not None for name in (LABELS, SHIFTED))
        items = inputs.get("num_items_in_batch")
        if not learns:
            loss = self._judged(run, call, items) if has_labels else None
            return Output(loss, lambda: self._looked_at(run, call))
        if not has_labels:
            if run.config.parallel.pp > 1:
                raise ValueError(PIPELINED.format(pp=run.config.parallel.pp))
            self.open = call
            logits = self._logits(run, call)
            return Output(None, lambda: logits)
        loss = self._learned(run, call, items)
        return Output(loss, lambda: self._shown(run, call))

    def _named(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        names = [name for name in self._parameters_of_call if name != "self"]
        inputs = dict(zip(names, args)) | kwargs
        if bad := refused(inputs, self._parameters_of_call):
            raise ValueError(
                f"ds4d.accelerate: the model is called with {', '.join(bad)}; ds4d trains on "
                "input_ids, attention_mask, position_ids, and labels or shift_labels"
            )
        return inputs

    # -- batches ----------------------------------------------------------------------------

    def _work(self, run: ScriptRun, call: Call) -> Work:
        """Of the call's window, for arguments such as the call's."""
        done = call.window.done
        if call.keys not in done:
            whole = [self._whole(call, index) for index in range(len(call.window.items))]
            done[call.keys] = Work([run.cutter(batch) for batch in whole])
        return done[call.keys]

    def _whole(self, call: Call, index: int) -> MicroBatch:
        batch = micro_batch(
            call.tensors(index),
            model_type=self.module.config.model_type,
            counts=call.window.items[index].share.real > 0,
        )
        if batch.documents is not None and bool((batch.documents.ids[:, 0] < 0).any()):
            if reason := supports(self.module.config, documents=True):
                raise ValueError(f"ds4d.accelerate: padding on the left can't be masked: {reason}")
        return batch

    # -- training ---------------------------------------------------------------------------

    def _learned(self, run: ScriptRun, call: Call, items: Items) -> Tensor:
        """Args:
        items: what the script divides the sum of this rank's token losses by (transformers'
            ``num_items_in_batch``), and takes the mean over dp; None: see the head of this file.
        """
        engine, work = run.engine_for_training(), self._work(run, call)
        if work.counts is None:
            work.counts = engine.count(work.micro_batches)
        tokens = work.counts.sum()
        scale = engine.mean_scale(tokens)
        self.open = call
        if run.config.parallel.pp > 1:
            self._run_ahead(run, work, scale)
            run.pending_items = items
            whole = self._over_ranks(run, work.sums[call.index], work.counts[call.index], items)
            return Recorded.apply(anchor(run.device), whole, work.factors)
        part = engine.forward(work.micro_batches[call.index], scale)
        whole = self._over_ranks(run, part.detach(), work.counts[call.index], items)
        if items is None:
            return Weighted.apply(part, whole, scale * len(work.micro_batches))
        # DeepSpeed takes the mean over dp x cp, but ranks of cp have parts of one sum
        share = run.config.parallel.cp / torch.as_tensor(items, device=run.device)
        return Weighted.apply(part, whole, share.float())

    def _over_ranks(self, run: ScriptRun, part: Tensor, targets: Tensor, items: Items) -> Tensor:
        """The loss of a micro-batch, the same on all ranks.

        Args:
            part: of the sum of its token losses, here.
            targets: over all ranks.
        """
        whole = part.float() if items is None else part.float() / items
        whole = whole.clone()
        dist.all_reduce(whole, group=run.mesh.group("pp_dp_cp"))
        return whole / (targets.clamp(min=1) if items is None else run.config.parallel.dp)

    def _run_ahead(self, run: ScriptRun, work: Work, scale: Tensor) -> None:
        """The schedule of the window, when its first micro-batch is asked for."""
        if run.pending is work:
            return
        if run.pending is not None:
            raise RuntimeError(
                "ds4d.accelerate: the model was called in training for another step before "
                "optimizer.step(); under a pipeline a call has run backward, too. To look at a "
                "loss use model.eval() or torch.no_grad(); to accumulate, call it with the "
                "tensors of the loader's batches (change these in the collate function)"
            )
        run.pending, work.factors = work, []
        work.sums = run.engine_for_training().run_schedule(work.micro_batches, scale)

    # -- evaluation -------------------------------------------------------------------------

    @torch.no_grad()
    def _judged(self, run: ScriptRun, call: Call, items: Items) -> Tensor:
        """A pipeline runs all batches of the window at once."""
        work, done = self._work(run, call), call.window.done
        if run.config.parallel.pp == 1:
            ((part, count),) = run.eval_sums([work.micro_batches[call.index]])
        else:
            key = "sums", call.keys, self.module.training, run.steps
            if key not in done:
                done[key] = list(run.eval_sums(work.micro_batches))
            part, count = done[key][call.index]
        count = count.clone()
        dist.all_reduce(count, group=run.mesh.group("pp_dp_cp"))
        return self._over_ranks(run, part, count, items)

    # -- logits -----------------------------------------------------------------------------

    def _looked_at(self, run: ScriptRun, call: Call) -> Tensor:
        with torch.no_grad():
            return self._logits(run, call)

    def _shown(self, run: ScriptRun, call: Call) -> Tensor:
        """Beside a loss in training: another forward pass, with the random numbers of none."""
        devices = [run.device] if run.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            logits = self._looked_at(run, call)
        return Shown.apply(logits, anchor(run.device))

    def _logits(self, run: ScriptRun, call: Call) -> Tensor:
        batch = self._work(run, call).micro_batches[call.index].to(run.device)
        length = call.tensors(call.index)["input_ids"].shape[1]
        if run.config.parallel.pp > 1:
            logits = run.pipeline.logits(batch)
        else:
            logits = whole_logits(run.called, batch)
        if run.config.parallel.cp > 1:
            places = [self._places(run, call, rank) for rank in range(run.config.parallel.cp)]
            logits = gather_sequence(logits, places, run.mesh.group("cp"))
        return logits[:, :length]

    def _places(self, run: ScriptRun, call: Call, rank: int) -> Tensor:
        """Where a rank's tokens stand in the sequence."""
        cutter = replace(run.cutter, rank=rank)
        return cutter(self._whole(call, call.index)).cut.places

    # -- what else scripts do with a model --------------------------------------------------

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' own, over all ranks of a tp and pp group. Collective: the world.

        Raises:
            ValueError: beams, where a rank has several chunks of a pipeline.
        """
        run = self._begin()
        settings = kwargs.get("generation_config") or self.module.generation_config
        beams = kwargs.get("num_beams") or getattr(settings, "num_beams", None) or 1
        schedule = run.config.pipeline.schedule
        if beams > 1 and schedule in SEVERAL_CHUNKS and run.config.parallel.pp > 1:
            raise ValueError(BEAMS.format(schedule=schedule, beams=beams))
        run.set_training(False)
        with run.generating():
            return type(self.module).generate(self.module, *args, **kwargs)

    def save_checkpoint(self, folder: str, tag: str | None = None, **_: Any) -> None:
        """A ds4d checkpoint in ``folder``. Collective: the world."""
        self._begin().save(folder)

    def load_checkpoint(self, folder: str, tag: str | None = None, **_: Any) -> tuple[str, dict]:
        """Continue from ``save_checkpoint``, in this layout or another. Collective: the world."""
        self._begin().load(folder)
        return folder, {}

    def get_global_grad_norm(self) -> float | None:
        """Of the last step."""
        run = self._begin()
        return None if run.stepped is None else run.stepped.grad_norm

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """As DDP's: gradients are reduced when the step's last batch has gone back, in any case."""
        yield

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Of the whole model, on the CPU of the main process; empty elsewhere. Collective: the
        world."""
        return self._begin().whole_state()

    @property
    def config(self) -> Any:
        return self.module.config
