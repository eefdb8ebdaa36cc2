"""Hidden states and their gradients on the way between the ranks of one pipeline.

Who sends what to whom, and in which order, follows from the schedule alone, so nothing is agreed
upon on the way: a receiver posts its receives in the sender's order, one ahead of what it waits
for, and a sender never waits. Shapes follow from the micro-batches, which every stage has.

Between two ranks each direction has a communicator of its own (``mesh.py``): no order of posting
can make two ranks wait for each other, and torch's batches, which are there to prevent that,
would only make one transfer wait for another.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch
import torch.distributed as dist
from torch import Tensor

from ds4d.comm import Pending, begin_receive, begin_send, open_transport
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


class Mail:
    """The transfers of one run of a schedule.

    Args:
        rank: of ``up`` and ``down``, the groups for tensors that go to a higher and to a lower
            rank.
        incoming: ``messages_to(rank, schedule)``.
        new_tensor: makes what a message is received into.

    Making one is collective the first time: ``up`` and ``down``.
    """

    def __init__(
        self,
        rank: int,
        incoming: dict[int, tuple[Message, ...]],
        *,
        up: dist.ProcessGroup,
        down: dist.ProcessGroup,
        device: torch.device,
        new_tensor: Callable[[Message], Tensor],
    ) -> None:
        for group in (up, down):
            open_transport(group, device)
        self._rank, self._up, self._down = rank, up, down
        self._new_tensor = new_tensor
        self._expected = {sender: deque(messages) for sender, messages in incoming.items()}
        self._posted: dict[int, tuple[Message, Pending]] = {}
        self._arrived: dict[Message, Tensor] = {}
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        self._sender = {m: sender for sender, messages in incoming.items() for m in messages}
        for sender in self._expected:
            self._post(sender)

    def _post(self, sender: int) -> None:
        if self._expected[sender]:
            message = self._expected[sender].popleft()
            group = self._up if sender < self._rank else self._down
            pending = begin_receive(self._new_tensor(message), sender, group)
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
        group = self._up if to > self._rank else self._down
        self._sent.append((begin_send(x, to, group, purpose=PURPOSE), x))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

    def finish(self) -> None:
        """Wait until everything has been sent."""
        while self._sent:
            work, _ = self._sent.popleft()
            work.wait()


