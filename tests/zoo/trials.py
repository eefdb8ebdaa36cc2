"""One type of model in some layouts: refused by ``check``, exact by ``verify``'s comparison, or a
defect.

A type's file is made small once, as ``ds4d verify`` makes it, and one plain process trains it; then
each column overrides the layout, is judged as any file, and trained on the workers of the tests.
"""

from __future__ import annotations

import json
import random
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ds4d import attention
from ds4d.config.errors import ConfigError
from ds4d.config.load import load
from ds4d.config.types import RunConfig
from ds4d.model.shrink import shrunken
from ds4d.verify.ranks import RanksFailed
from ds4d.verify.run import Bench
from ds4d.verify.small import Small, make_small
from tests.verify_runs import on_workers

TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
COLUMNS = {
    "1 rank": {},
    "tp 2": {"tp": 2},
    "pp 2": {"pp": 2},
    "cp 2": {"cp": 2},
    "tp 2 x pp 2": {"tp": 2, "pp": 2},
}
EXACT, REFUSED, WRONG, FAILED = "exact", "refused", "wrong", "failed"
STEPS, LENGTH, BATCH = 2, 48, 4
VOCABULARY = 100  # of what the samples have; ids are taken modulo the model's
# With an eps that keeps rounding in small gradients small.
ADAMW = {
    "type": "AdamW",
    "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-3, "weight_decay": 0.1},
}
# What a causal model of the type has that the default config has not.
CAUSAL = {"big_bird": {"attention_type": "original_full"}}
LONGEST_SECONDS = 120


@dataclass(frozen=True)
class Outcome:
    """Attributes:
    type, column: what was tried.
    outcome: exact or refused; wrong and failed are defects.
    why: what ``check`` says, a line for each problem; of a defect, what is off or was raised.
    """

    type: str
    column: str
    outcome: str
    why: str = ""


def try_type(
    model_type: str, columns: Sequence[str], *, seconds: float = LONGEST_SECONDS
) -> Iterator[Outcome]:
    """Args:
    seconds: that each column may take.
    """
    with tempfile.TemporaryDirectory(prefix="ds4d-zoo-") as folder:
        tried = _Type(model_type, Path(folder))
        for column in columns:
            try:
                with _at_most(seconds):
                    tried.prepare()
                    outcome, why = tried.judge(COLUMNS[column])
            except ConfigError as error:
                outcome, why = REFUSED, "\n".join(p.message for p in error.problems)
            except Exception as error:  # a defect, whatever it is
                outcome, why = FAILED, _last_line(f"{type(error).__name__}: {error}")
            yield Outcome(model_type, column, outcome, why)


class _Type:
    """One type: its small file, what trains it, and what a rank has raised."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.small: Small | None = None
        self.bench: Bench | None = None
        self.raised = ""

    def prepare(self) -> None:
        """The small file, once.

        Raises:
            ConfigError: one rank can't train it either.
        """
        if self.small is None:
            run = load(_file(self.name, self.folder))
            self.small = make_small(run, self.folder, steps=STEPS, max_ranks=1)

    def judge(self, degrees: dict[str, int]) -> tuple[str, str]:
        """Raises:
        ConfigError: refused.
        """
        run = self.small.run(*(f"ds4d.parallel.{axis}={n}" for axis, n in degrees.items()))
        self.bench = self.bench or Bench(self.small, self._call)
        self.raised = ""
        judged = self.bench.judge(run)
        if self.raised:
            return FAILED, self.raised
        off = [row for row in judged.rows if not row.passed]
        if not off:
            return EXACT, ""
        return WRONG, "; ".join(f"{row.what} {row.where} {row.error:.1e}" for row in off[:4])

    def _call(self, run: RunConfig, results: Path) -> None:
        try:
            on_workers(run, results)
        except RanksFailed as error:
            self.raised = _last_line(str(error))
            raise


def _file(model_type: str, folder: Path) -> dict[str, Any]:
    """As a user would write it, of a model that is small from the beginning."""
    model: dict[str, Any] = {"config": {"model_type": model_type}}
    packed = False
    if config := small_config(model_type):
        config.save_pretrained(folder / "asked")
        model = {"path": str(folder / "asked")}
        packed = attention.supports(config, documents=True) is None
    samples = folder / "asked.jsonl"
    samples.write_text("".join(json.dumps(line) + "\n" for line in _samples(packed)))
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": ADAMW,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "ds4d": {
            "model": model,
            "data": {"seq_len": LENGTH, "train": {"type": "tokens", "path": str(samples)}},
            "parallel": {"dp": 1},
            "training": {"steps": STEPS},
        },
    }


def small_config(model_type: str) -> PreTrainedConfig | None:
    """Of the type's default config; encoders are made decoders, as ``check`` wants it. None: it
    has no default, or none that can be made smaller."""
    cls = CONFIG_MAPPING[model_type]
    try:
        try:
            return shrunken(cls(is_decoder=True, **CAUSAL.get(model_type, {})))
        except TypeError:
            return shrunken(cls())
    except (ValueError, StrictDataclassError):
        return None


def _samples(packed: bool) -> Iterator[dict[str, Any]]:
    """Of many lengths, some of whose tokens are no targets; packed: of several documents."""
    draw = random.Random(0)
    for _ in range(STEPS * BATCH):
        ids = [draw.randrange(5, VOCABULARY) for _ in range(draw.randint(LENGTH // 2, LENGTH))]
        line = {"input_ids": ids}
        line["labels"] = [-100 if draw.random() < 0.2 else token for token in ids]
        if packed:
            line["document_ids"] = sorted(draw.randrange(3) for _ in ids)
        yield line


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    def ring(*_args: Any) -> None:
        raise TimeoutError(f"not done in {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


