"""Hidden states and their gradients on the way between the ranks of one pipeline.

Who sends what to whom, and in which order, follows from the schedule alone, so nothing is agreed
upon on the way: a receiver posts its receives in the sender's order, one ahead of what it waits
for, and a sender never waits. Shapes follow from the micro-batches, which every stage has.

Each direction between two ranks is a lane with a communicator of its own (``mesh.py``), so no order
of posting can make two ranks wait for each other, and no transfer waits for another one.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ds4d.comm import Pending, Work, begin_receive, begin_send, open_transport
from ds4d.mesh import Mesh
from ds4d.pipeline.actions import Kind, Schedule

PURPOSE = "pipeline"


class Message(NamedTuple):
    """Attributes:
    stage: the virtual stage that receives it.
    gradient: of the stage's output; else it is the stage's input.
    """

    stage: int
    micro_batch: int
    gradient: bool


def messages_to(rank: int, schedule: Schedule) -> dict[int, tuple[Message, ...]]:
    """What other ranks send to ``rank``: by sender, in the order in which it is sent."""
    placement = schedule.placement
    found: dict[int, list[Message]] = defaultdict(list)
    for sender, actions in enumerate(schedule.actions):
        stages = list(placement.of_rank(sender))
        for kind, chunk, micro_batch in actions:
            step = _TRAVELS.get(kind)
            stage = stages[chunk] + (step or 0)
            if step is None or not 0 <= stage < placement.stages or sender == rank:
                continue
            if placement.places[stage].rank == rank:
                found[sender].append(Message(stage, micro_batch, gradient=step < 0))
    return {sender: tuple(messages) for sender, messages in found.items()}


# what is sent after a pass: to the next stage, or to the one before
_TRAVELS = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUT: -1}


def open_lanes(mesh: Mesh, device: torch.device) -> None:
    """Once, before the first transfer. Collective: pp."""
    for lane in dict.fromkeys(mesh.lanes.values()):
        open_transport(lane, device)


def begin_send_to(to: int, x: Tensor, mesh: Mesh, *, purpose: str = PURPOSE) -> Work:
    """To a neighbour, by its place in this rank's pipeline; ``x`` is contiguous."""
    return begin_send(x, to, mesh.lanes[mesh.coordinate.pp, to], purpose=purpose)


def begin_receive_from(sender: int, out: Tensor, mesh: Mesh) -> Pending:
    """What a neighbour, by its place in this rank's pipeline, sends next."""
    return begin_receive(out, sender, mesh.lanes[sender, mesh.coordinate.pp])


class Mail:
    """The transfers of one run of a schedule.

    Args:
        incoming: ``messages_to`` this rank's place in the pipeline.
        new_tensor: makes what a message is received into.
    """

    def __init__(
        self,
        mesh: Mesh,
        incoming: dict[int, tuple[Message, ...]],
        new_tensor: Callable[[Message], Tensor],
    ) -> None:
        self._mesh = mesh
        self._new_tensor = new_tensor
        self._expected = {sender: deque(messages) for sender, messages in incoming.items()}
        self._posted: dict[int, tuple[Message, Pending]] = {}
        self._arrived: dict[Message, Tensor] = {}
        self._sent: deque[tuple[Work, Tensor]] = deque()
        self._sender = {m: sender for sender, messages in incoming.items() for m in messages}
        for sender in self._expected:
            self._post(sender)

    def _post(self, sender: int) -> None:
        if self._expected[sender]:
            message = self._expected[sender].popleft()
            pending = begin_receive_from(sender, self._new_tensor(message), self._mesh)
            self._posted[sender] = (message, pending)

    def receive(self, message: Message) -> Tensor:
        """Waits for it; on a GPU the stream does, not the program."""
        sender = self._sender[message]
        while message not in self._arrived:
            first, pending = self._posted.pop(sender)
            self._post(sender)
            self._arrived[first] = pending.wait()
        return self._arrived.pop(message)

    def send(self, x: Tensor, to: int) -> None:
        """Does not wait. ``x`` is let go as soon as it has been sent."""
        x = x.contiguous()
        self._sent.append((begin_send_to(to, x, self._mesh), x))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

    def finish(self) -> None:
        """Wait until everything has been sent."""
        while self._sent:
            work, _ = self._sent.popleft()
            work.wait()
