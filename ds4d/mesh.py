"""Where every rank stands: rank <-> (pp, dp, cp, tp), and all process groups.

Rank order is pp, dp, cp, tp with tp innermost, so that the ranks that talk most are neighbours.
This is the only place that makes process groups. DeepSpeed sees three axes (its words stay in
``DeepSpeedMpu``): ``pipe`` = pp, ``data`` = dp x cp with cp inner, ``model`` = tp; a fourth axis
would break its reductions (shared/deepspeed_facts.md, 1).
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field

import torch.distributed as dist

from ds4d.attention.context import ContextParallel
from ds4d.config.layout import (
    GROUP_AXES,
    Coordinate,
    context_ranks,
    coordinate_of,
    group_ranks,
    ranks_along,
)
from ds4d.config.types import ContextConfig, ParallelConfig
from ds4d.context_parallel import Cutter
from ds4d.tensor_parallel.state import TensorParallel

Lane = tuple[int, int]  # from one stage's place in its pipeline to a neighbour's


@dataclass(frozen=True)
class Mesh:
    """This rank's place and its groups. A group of one rank is a real group, so that code for a
    size-1 axis is the same code.

    Attributes:
        groups: by name (``config.layout.GROUP_AXES``). ``pp_ends``: the first and the last
            rank of a pipeline, which may share a tied weight; on those between them it is ``pp``,
            and not used. ``ulysses``: neighbours in ``cp``, which exchange heads; ``ring``: one
            rank of each of these.
        lanes: for each direction between neighbours in a pipeline, the last rank's being the first,
            a group of ``pp`` in which neither of the two sends or receives anything else. NCCL
            runs what a group is given in order: so whatever is posted first on either side of a
            lane waits for its own counterpart and for nothing else.
    """

    parallel: ParallelConfig
    rank: int
    coordinate: Coordinate
    groups: dict[str, dist.ProcessGroup] = field(repr=False)
    lanes: dict[Lane, dist.ProcessGroup] = field(repr=False)

    @classmethod
    def create(
        cls,
        parallel: ParallelConfig,
        context: ContextConfig = ContextConfig(),
        *,
        timeout_seconds: float = 1800.0,
    ) -> "Mesh":
        """Make all groups. Collective: every rank of the world must call, once a run.

        Names whose member lists are equal (all of them when three axes have size 1) share one
        group, which keeps the number of communicators small.

        Raises:
            ValueError: the degrees do not multiply to the world size.
        """
        world_size, rank = dist.get_world_size(), dist.get_rank()
        if parallel.world_size != world_size:
            raise ValueError(
                f"ds4d.parallel: pp {parallel.pp} x dp {parallel.dp} x cp {parallel.cp} x "
                f"tp {parallel.tp} = {parallel.world_size}, but {world_size} ranks were started"
            )
        timeout = datetime.timedelta(seconds=timeout_seconds)
        made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {
            (tuple(range(world_size)),): dist.group.WORLD
        }
        groups = {}
        named = {name: group_ranks(name, parallel) for name in GROUP_AXES}
        named |= context_ranks(parallel, context)
        for name, lists in named.items():
            members = tuple(map(tuple, lists))
            if members not in made:
                made[members] = _made([list(m) for m in members], timeout)
            groups[name] = made[members]
        pipelines = group_ranks("pp", parallel)
        groups["pp_ends"], lanes = groups["pp"], {}
        if parallel.pp > 1:
            lanes = _lanes(pipelines, timeout)
        if parallel.pp > 2:
            groups["pp_ends"] = _ends(pipelines, timeout) or groups["pp"]
        return cls(parallel, rank, coordinate_of(rank, parallel), groups, lanes)

    @staticmethod
    def second_world(*, timeout_seconds: float) -> dist.ProcessGroup:
        """All ranks once more, on the CPU: for a thread that runs beside the training, whose
        collectives would mix with those of any other group. Collective: the world."""
        return dist.new_group(
            backend="gloo", timeout=datetime.timedelta(seconds=timeout_seconds)
        )

    def sharing_samples(
        self, *, timeout_seconds: float = 1800.0
    ) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """On the CPU: the ranks that see the same samples (those of one place on dp), and the
        world. For batches that one rank reads for others. Collective: the world."""
        timeout = datetime.timedelta(seconds=timeout_seconds)
        lists = ranks_along(("pp", "cp", "tp"), self.parallel)
        sharing = dist.new_subgroups_by_enumeration(lists, timeout=timeout, backend="gloo")[0]
        return sharing, self.second_world(timeout_seconds=timeout_seconds)

    def group(self, name: str) -> dist.ProcessGroup:
        return self.groups[name]

    def size(self, name: str) -> int:
        return dist.get_world_size(self.groups[name])

    def tensor_parallel(self) -> TensorParallel:
        """The tp axis, for one model to be built with."""
        parallel = self.parallel
        return TensorParallel(
            self.group("tp"), parallel.sequence_parallel, overlap=parallel.tp_overlap
        )

    def context_parallel(self, context: ContextConfig) -> ContextParallel:
        """The cp axis, for one model to be built with."""
        return ContextParallel(self.group("ring"), self.group("ulysses"), context.exchange)

    @property
    def cutter(self) -> Cutter:
        """Takes this rank's part of whole sequences."""
        parts = self.parallel.tp if self.parallel.sequence_parallel else 1
        return Cutter(self.coordinate.cp, self.parallel.cp, self.size("ulysses"), parts)

    @property
    def dropout_rank(self) -> int:
        """Differs between ranks that hold other tokens or other layers outside of attention and
        MLP, and agrees between those that hold the same."""
        rank = dist.get_rank(self.groups["pp_dp_cp"])
        if not self.parallel.sequence_parallel:
            return rank
        return rank * self.parallel.tp + self.coordinate.tp

    @property
    def dp(self) -> int:
        """This rank's place on the data axis: which samples it reads."""
        return self.coordinate.dp


def _ends(pipelines: list[list[int]], timeout: datetime.timedelta) -> dist.ProcessGroup | None:
    """Of the first and the last rank of each pipeline. Collective: the world."""
    return _made([[ranks[0], ranks[-1]] for ranks in pipelines], timeout)


def _lanes(
    pipelines: list[list[int]], timeout: datetime.timedelta
) -> dict[Lane, dist.ProcessGroup]:
    """Of a pipeline's ring. Neighbouring edges of the ring take different groups, so two (three
    where their number is odd) are enough for each direction. Collective: the world."""
    places = len(pipelines[0])
    edges = [(here, (here + 1) % places) for here in range(places if places > 2 else 1)]
    colours = [index % 2 for index in range(len(edges))]
    if len(edges) % 2 and len(edges) > 1:
        colours[-1] = 2
    lanes: dict[Lane, dist.ProcessGroup] = {}
    for colour in range(max(colours) + 1):
        here = [edge for edge, its in zip(edges, colours) if its == colour]
        lanes |= dict.fromkeys(here, _made(pipelines, timeout))
        lanes |= dict.fromkeys([edge[::-1] for edge in here], _made(pipelines, timeout))
    return lanes


def _made(members: list[list[int]], timeout: datetime.timedelta) -> dist.ProcessGroup | None:
    """This rank's of some disjoint groups. Collective: the world."""
    return dist.new_subgroups_by_enumeration(members, timeout=timeout)[0]


class DeepSpeedMpu:
    """The mesh in DeepSpeed's words. Never give it ``get_sequence_*`` methods: with those
    DeepSpeed changes how it averages, and wrongly so under ZeRO-3."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def get_data_parallel_group(self):
        return self._mesh.group("dp_cp")

    def get_data_parallel_world_size(self) -> int:
        return self._mesh.size("dp_cp")

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self._mesh.group("dp_cp"))

    # norms and overflows are of all parts of a model: those of the stages, too

    def get_model_parallel_group(self):
        return self._mesh.group("model")

    def get_model_parallel_world_size(self) -> int:
        return self._mesh.size("model")

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self._mesh.group("model"))

    def get_tensor_model_parallel_group(self):
        return self._mesh.group("tp")

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._mesh.size("tp")

    def get_tensor_model_parallel_rank(self) -> int:
        return self._mesh.coordinate.tp

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self._mesh.size("pp")
