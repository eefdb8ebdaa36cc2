"""A file under judgement: values by dotted key, with the schema's defaults behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ds4d.config import batch, model_facts
from ds4d.config.types import BatchSizes
from ds4d.config.validate import default
from ds4d.pipeline.actions import Placement
from ds4d.pipeline.schedules import placement_of

if TYPE_CHECKING:
    from ds4d.pipeline.partition import Split

AUTO = "auto"
GATHERED_TOKENS = 512


class Draft:
    """Attributes:
    content: the file, its form checked.
    world_size: ranks, where known.
    hosts: their names with the number of ranks on each, in the order of ranks; where known.
    """

    def __init__(
        self,
        content: Mapping[str, Any],
        world_size: int | None = None,
        hosts: Mapping[str, int] | None = None,
    ) -> None:
        self.content = content
        self.world_size = world_size
        self.hosts = hosts or {}

    def given(self, path: str) -> Any:
        """What the file says, None where it says nothing."""
        value: Any = self.content
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def get(self, path: str) -> Any:
        """What the file says, or else the default."""
        value = self.given(path)
        return default(path) if value is None else value

    def number(self, path: str) -> Any:
        """What the file says, None where it says nothing or "auto"."""
        value = self.given(path)
        return None if value == AUTO else value

    def present(self, *paths: str) -> Iterator[str]:
        """Those of the keys that the file has."""
        return (path for path in paths if self.given(path) is not None)

    def degree(self, axis: str) -> int | str:
        return self.get(f"ds4d.parallel.{axis}")

    @property
    def zero_stage(self) -> int:
        return self.get("zero_optimization.stage")

    @cached_property
    def dp(self) -> int:
        """Raises: batch.Unsolvable."""
        degrees = {axis: self.degree(axis) for axis in ("tp", "pp", "cp", "dp")}
        return batch.solve_dp(degrees, self.world_size)

    @cached_property
    def batch(self) -> BatchSizes:
        """Raises: batch.Unsolvable."""
        words = (batch.TRAIN, batch.MICRO, batch.ACCUMULATION)
        return batch.solve_batch(*map(self.number, words), self.dp)

    @cached_property
    def why_not_tp(self) -> str | None:
        """Why the model can't be cut over this tp; None: it can."""
        return self.model.why_not_cut(self.degree("tp"), sequence_parallel=False)

    @cached_property
    def why_not_sequence_parallel(self) -> str | None:
        """Why its residual stream can't be cut along the sequence as well; None: it can."""
        tp, length, limit = self.degree("tp"), self.given("ds4d.data.seq_len"), self.model.positions
        padded = length + -length % tp
        if limit is not None and length <= limit < padded:
            return f"ds4d.data.seq_len {length} would be padded to {padded}, past {limit} positions"
        rope = (self.model.get("rope_parameters") or {}).get("rope_type")
        if padded != length and rope in ("dynamic", "longrope"):
            return (
                f"ds4d.data.seq_len {length} would be padded to {padded}, and rope_type {rope} "
                "depends on the length"
            )
        return self.model.why_not_cut(tp, sequence_parallel=True)

    @cached_property
    def why_not_pp(self) -> str | None:
        """Why the model can't be cut into stages; None: it can."""
        return self.model.why_not_staged()

    @cached_property
    def why_not_cp(self) -> str | None:
        """Why a sequence of the model can't be shared; None: it can."""
        return self.model.why_not_shared()

    @cached_property
    def ulysses_size(self) -> int | None:
        """``context.ulysses_size``; where it is to be chosen, the largest that leaves a ring of two
        or more and divides the attention heads of a rank; None: there is none."""
        cp, method = self.degree("cp"), self.get("ds4d.context.method")
        asked = self.given("ds4d.context.ulysses_size")
        if method != "hybrid" or asked is not None:
            return {"ring": 1, "ulysses": cp}.get(method, asked)
        heads = self.model.get("num_attention_heads")
        heads = heads // self.degree("tp") if isinstance(heads, int) else cp
        sizes = [n for n in range(2, cp) if cp % n == 0 and heads % n == 0]
        return max(sizes, default=None)

    @property
    def exchange(self) -> str:
        """``context.exchange``; "auto": all keys at once where a place in the ring has few tokens,
        for then a step of the ring is shorter than what it takes to begin one. Not in a ring of
        two: its one step is beside the work with own keys."""
        asked = self.get("ds4d.context.exchange")
        ring = self.degree("cp") // (self.ulysses_size or 1)
        if asked != AUTO:
            return asked
        few = self.given("ds4d.data.seq_len") <= GATHERED_TOKENS * ring
        return "all_gather" if ring > 2 and few else "p2p"

    @cached_property
    def placement(self) -> Placement:
        """Where the virtual stages of the pipeline are.

        Raises: ValueError: the schedule has another number of chunks.
        """
        schedule, chunks = (self.get(f"ds4d.pipeline.{key}") for key in ("schedule", "chunks"))
        return placement_of(schedule, self.degree("pp"), chunks)

    @cached_property
    def split(self) -> Split | None:
        """The layers of each virtual stage; None: the model is not known, or refused.

        Raises: ValueError: there are too few layers, or ``ds4d.pipeline.split`` does not fit;
            batch.Unsolvable.
        """
        asked, model = self.given("ds4d.pipeline.split"), self.model
        if model.config is None or model.problems or self.why_not_pp:
            return None
        if asked is None and model.vocabulary_is_guessed:
            return None
        from ds4d.pipeline.costs import model_costs
        from ds4d.pipeline.partition import make_split

        costs = model_costs(
            model.config,
            seq_len=self.given("ds4d.data.seq_len"),
            sequences=self.batch.micro,
            recompute=self.recompute,
        )
        return make_split(costs, self.placement, asked)

    @property
    def recompute(self) -> str:
        asked = self.get("ds4d.recompute")
        if asked != AUTO:
            return asked
        return "full" if self.given("activation_checkpointing") is not None else "none"

    @property
    def sequence_parallel(self) -> bool:
        """As asked for; "auto": where tp is more than 1 and the model allows it."""
        asked = self.get("ds4d.parallel.sequence_parallel")
        if asked != AUTO:
            return asked
        return self.degree("tp") > 1 and self.why_not_sequence_parallel is None

    @property
    def param_dtype(self) -> str:
        """Of the weights in the forward pass. "auto" means bf16, for bf16 and fp16 both."""
        bf16, fp16 = self.get("bf16.enabled"), self.get("fp16.enabled")
        if bf16 is True or (bf16 == AUTO and fp16 is not True):
            return "bf16"
        return "fp16" if fp16 is True else "fp32"

    @property
    def grad_accum_dtype(self) -> str:
        return self.given("data_types.grad_accum_dtype") or "fp32"

    @cached_property
    def model(self) -> model_facts.ModelFacts:
        return model_facts.look_up(
            self.given("ds4d.model") or {},
            tokenizer_size=self.given("ds4d.data.tokenizer.vocab_size"),
        )
