"""Optimizers and schedules of scripts.

A script makes its optimizer of its whole model's parameters. The engine steps on another object of
the same class, whose groups are the very same dicts, with this rank's parameters in them: so
what a schedule writes into them (the learning rate) is what the engine uses, and what the engine
has no use for, such as an empty group, stays in the script's.

Scripts whose file has an ``optimizer`` block hand over Accelerate's ``DummyOptim`` instead.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DummyOptim, DummyScheduler
from accelerate.utils.deepspeed import DeepSpeedSchedulerWrapper
from torch import nn
from torch.optim import Optimizer

from ds4d.accelerate.run import Optimization, ScriptRun
from ds4d.config.types import RunConfig
from ds4d.optim import FileOptimizer, build_scheduler

ELEMENTWISE = (
    "Adam", "AdamW", "SGD", "Adagrad", "NAdam", "RAdam", "Adamax", "RMSprop", "Adadelta", "Lion",
    "ASGD", "Rprop",
)  # fmt: skip
Group = dict[str, Any]
REST = "not in the script's optimizer"


@dataclass(frozen=True)
class Names:
    """Attributes:
    of: the parameters that the script has seen -> their first names.
    tied: second name -> first, of parameters that are one.
    """

    of: Mapping[nn.Parameter, str]
    tied: Mapping[str, str]

    def __call__(self, parameter: nn.Parameter) -> str:
        """Raises: ValueError: it is none of the model's."""
        if parameter not in self.of:
            raise ValueError(
                "ds4d.accelerate: the optimizer has a parameter of shape "
                f"{list(parameter.shape)} that is none of the prepared model's"
            )
        return self.of[parameter]

    def learning(
        self, parameters: Iterable[nn.Parameter], here: Iterable[tuple[str, nn.Parameter]]
    ) -> list[nn.Parameter]:
        """Those of ``here``, a rank's named parameters, that stand for ``parameters``. A stage may
        have the second of two names alone."""
        found = {self.tied.get(name, name): p for name, p in here}
        mine = (found.get(self(p)) for p in parameters)
        return [p for p in mine if p is not None and p.requires_grad]


def refuse(optimizer: Optimizer) -> None:
    """Under ZeRO, tp and pp a rank updates a slice: rules that look at whole matrices would change
    the training curve with the layout.

    Raises:
        ValueError: the optimizer has such a rule, or is not known.
    """
    known = any(base.__name__ in ELEMENTWISE for base in type(optimizer).__mro__)
    if not known or "lbfgs" in type(optimizer).__name__.lower():
        raise ValueError(
            f"ds4d.accelerate: the optimizer is a {type(optimizer).__name__}, which ds4d does not "
            "know to treat each number of a weight by itself; ranks hold parts of weights. Known: "
            + ", ".join(ELEMENTWISE)
        )


@dataclass(frozen=True)
class ScriptOptimizer:
    """Args:
    optimizer: the script's.
    names: of the parameters that it was made of.
    """

    optimizer: Optimizer
    names: Names

    def groups(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> list[Group]:
        """The script's own dicts, with what this rank has in the place of the parameters.

        Raises:
            ValueError: one is of a parameter that is not the model's.
        """
        here = list(named_parameters)
        for number, group in enumerate(self.optimizer.param_groups):
            group["params"] = self.names.learning(group["params"], here)
            group["name"] = group.get("name", f"group_{number}")
        return [*self.optimizer.param_groups, self._rest(here)]

    def _rest(self, here: list[tuple[str, nn.Parameter]]) -> Group:
        """What the script has left out: it learns nothing, but its gradients are in the norm."""
        taken = {p for group in self.optimizer.param_groups for p in group["params"]}
        left = [p for _, p in here if p.requires_grad and p not in taken]
        still = {"lr": 0.0, "weight_decay": 0.0}
        known = {k: v for k, v in still.items() if k in self.optimizer.defaults}
        return {**self.optimizer.defaults, **known, "params": left, "name": REST}

    def make(self, groups: list[Group]) -> Optimizer:
        stepped = copy.copy(self.optimizer)
        stepped.__dict__.pop("step", None)  # a schedule's wrapper around the script's
        stepped.param_groups, stepped.state = groups, defaultdict(dict)
        return stepped


@dataclass(frozen=True)
class DummyOptimizer:
    """The file's optimizer on the groups that the script has made.

    Args:
        file: says what all have in common.
        params: the groups, or parameters.
    """

    file: FileOptimizer
    params: list[Any]
    names: Names

    def groups(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> list[Group]:
        if not all(isinstance(group, dict) for group in self.params):
            return self.file.groups(named_parameters)
        here = list(named_parameters)
        return [
            {
                **group,
                "params": self.names.learning(group["params"], here),
                "name": group.get("name", f"group_{number}"),
            }
            for number, group in enumerate(self.params)
        ]

    def make(self, groups: list[Group]) -> Optimizer:
        return self.file.make(groups)


def optimization(
    optimizer: Any, scheduler: Any, run: RunConfig, names: Names
) -> Optimization:
    """Args:
    optimizer: the script's, or ``DummyOptim``.
    scheduler: ``DummyScheduler``, or None: the script steps its own.
    """
    if isinstance(optimizer, DummyOptim):
        file = FileOptimizer(run.deepspeed["optimizer"], run.training.decay_all)
        maker: Any = DummyOptimizer(file, list(optimizer.params), names)
    else:
        maker = ScriptOptimizer(optimizer, names)
    groups = getattr(optimizer, "param_groups", None)
    return Optimization(maker, _schedule(scheduler, run), groups)


def _schedule(scheduler: Any, run: RunConfig) -> Callable[[Optimizer], Any]:
    if scheduler is None:
        return lambda _: None
    if scheduler.lr_scheduler_callable is not None:
        return scheduler.lr_scheduler_callable
    config = run.deepspeed.get("scheduler")
    return lambda stepped: build_scheduler(
        stepped, config, total_steps=scheduler.total_num_steps or 1
    )


def fills_of(optimizer: Any, scheduler: Any, *, processes: int) -> dict[str, Any]:
    """What "auto" stands for in the file's ``optimizer`` and ``scheduler``, as Accelerate has it:
    with ``total_num_steps`` counted over all processes."""
    fills: dict[str, Any] = {}
    if isinstance(optimizer, DummyOptim):
        fills["optimizer.params.lr"] = optimizer.lr
        fills["optimizer.params.weight_decay"] = optimizer.weight_decay
        fills["scheduler.params.warmup_max_lr"] = optimizer.lr
    if isinstance(scheduler, DummyScheduler):
        fills["scheduler.params.warmup_min_lr"] = 0
        fills["scheduler.params.warmup_num_steps"] = max(1, scheduler.warmup_num_steps)
        if scheduler.total_num_steps is not None:
            steps = math.ceil(scheduler.total_num_steps / processes)
            fills["scheduler.params.total_num_steps"] = steps
            fills["scheduler.params.total_steps"] = steps
    return fills


def move_schedule(schedule: Any, before: int, now: int) -> None:
    """A schedule that advances once for each of ``before`` processes in a step goes on where it
    advances for ``now``.

    Raises:
        ValueError: its rate does not follow from its position alone.
    """
    if before == now:
        return
    rate = getattr(schedule, "_get_closed_form_lr", None)
    if hasattr(schedule, "lr_lambdas") or hasattr(schedule, "total_steps"):
        rate = schedule.get_lr
    if rate is None:
        raise ValueError(
            f"ds4d.accelerate: the state is of num_processes {before}, here it is {now}, and a "
            f"{type(schedule).__name__} that counted them can't be moved: go on with as many, or "
            'let schedules count optimizer steps, by Accelerator(..., schedules_count="steps")'
        )
    schedule.last_epoch = schedule.last_epoch // before * now
    schedule._step_count = schedule.last_epoch + 1
    rates = rate()
    for group, lr in zip(schedule.optimizer.param_groups, rates):
        group["lr"] = lr
    schedule._last_lr = list(rates)


class PreparedOptimizer(AcceleratedOptimizer):
    """What a script gets for its optimizer: it steps the engine, once for each step.

    Args:
        optimizer: the script's; None: ``DummyOptim`` was given.
        begin: begins the run.
    """

    def __init__(self, optimizer: Optimizer | None, begin: Callable[[], ScriptRun]) -> None:
        self._of_script, self._begin = optimizer, begin
        self.step_due: Callable[[], bool] = lambda: False
        self.do_step: Callable[[], None] = lambda: None
        self.scaler, self.device_placement = None, False
        self._rates: list[Any] | None = None  # of a step that clipping has taken

    @property
    def optimizer(self) -> Optimizer:
        """The script's, or else the engine's."""
        if self._of_script is not None:
            return self._of_script
        return self._begin().engine_for_training().optimizer

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def param_groups(self) -> list[Group]:
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    def step(self, closure: Callable | None = None) -> None:
        """Collective: the world."""
        if closure is not None:
            raise ValueError("ds4d.accelerate: optimizer.step(closure) is not supported")
        taken_with, self._rates = self._rates, None
        if taken_with is not None and taken_with != self._rates_now():
            raise RuntimeError(
                "ds4d.accelerate: the learning rate was changed between clip_grad_norm_, which "
                "takes the step, and optimizer.step(); change it before"
            )
        if self.step_due():
            self.do_step()
        if self._of_script is not None:
            self._of_script._opt_called = True  # schedules ask whether it was stepped

    def remember_rates(self) -> None:
        """With which a step has been taken; ``step`` finds them unchanged, or says so."""
        self._rates = self._rates_now()

    def _rates_now(self) -> list[Any]:
        return [group["lr"] for group in self.param_groups]

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Nothing: the engine does so with each step."""

    @property
    def step_was_skipped(self) -> bool:
        stepped = self._begin().stepped
        return stepped is not None and stepped.skipped

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError(
            "ds4d.accelerate: the optimizer's state is spread over ranks; save it with "
            "accelerator.save_state(folder), which moves between layouts"
        )

    def load_state_dict(self, state_dict: Any) -> None:
        raise RuntimeError("ds4d.accelerate: load the state with accelerator.load_state(folder)")

    def train(self) -> None:
        """For optimizers that have modes; these have none."""

    def eval(self) -> None:
        """As ``train``."""


class FilesSchedule(DeepSpeedSchedulerWrapper):
    """What a script gets for ``DummyScheduler``: the file's, which advances once with each step of
    the optimizer, however often it is called."""

    def __init__(self, begin: Callable[[], ScriptRun], optimizer: PreparedOptimizer) -> None:
        self._begin = begin
        self.optimizers, self.split_batches, self.step_with_optimizer = [optimizer], False, True

    @property
    def scheduler(self) -> Any:
        return self._begin().schedule

    def step(self, *_: Any, **__: Any) -> None:
        self._begin().advance_schedule()

