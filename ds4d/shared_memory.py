"""Tensors between CPU processes of one host go through memory that they share.

It is what NCCL's SHM transport is to the GPUs of one host. gloo's way, TCP through the loopback
device, costs several times the CPU seconds.

Letters: t ranks of the group.

Phases:

1. Once a group, each pair of ranks connects a socket, and they try whether memory passes through
   it. All ranks take this transport, or none does.
2. A message lies in a buffer that one rank writes and its readers read. The sender marks it busy
   for each reader, copies the tensor into it and sends each of them a note: which message, which
   buffer, how many bytes.
3. A reader sleeps on its sockets until it has the notes it needs, computes from the buffers where
   they lie, and takes its marks off. A buffer without marks is used again; where all bear marks
   another is made. So nobody waits for room, and a message may have any size.

A collective is one message from each rank to each other. Sums run in the order of ranks, so that
all ranks have the same bits. Buffers are files without a name in memory: the kernel frees them with
the last process, however that ends; and it closes the sockets, which wakes those who wait.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import os
import select
import socket
import struct
import threading
import uuid
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

_REDUCTIONS = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum}
_COLLECTIVE, _MESSAGE = range(2)  # tags: each is counted by itself
_NOTE = struct.Struct("qqqq")  # tag, number of the message under that tag, buffer, bytes
_MARKS = 4096  # bytes at the head of a buffer, one a rank: it has still to read
_SMALLEST = 1 << 14  # bytes of a buffer
_LONGEST = 1e6  # seconds; poll counts milliseconds in 32 bits

_Use = Callable[[list[Tensor]], object]
Parcel = tuple[Tensor, int]  # and whom it goes to or comes from


class _Buffer:
    """A file, mapped. ``busy[rank]`` is that rank's mark."""

    def __init__(self, fd: int) -> None:
        whole = np.frombuffer(mmap.mmap(fd, 0), dtype=np.uint8)
        self.busy, self._data = whole[:_MARKS], whole[_MARKS:]

    def tensor(self, like: Tensor) -> Tensor:
        return torch.from_numpy(self._data[: like.nbytes]).view(like.dtype).view(like.shape)


class Work:
    """What has been begun. ``wait()`` before results are used, on any thread.

    Raises:
        RuntimeError: a rank that is waited for has ended, or is silent for the group's timeout.
    """

    def __init__(self, finish: Callable[[], None] | None) -> None:
        self._finish = finish

    def is_completed(self) -> bool:
        return self._finish is None

    def wait(self) -> None:
        if self._finish is not None:
            self._finish()
            self._finish = None


class Channel:
    """The ranks of one group. Collectives are matched in the order in which they are begun, and so
    are messages between two ranks; any number may be under way.

    What a collective reads must not change before it is waited for; what ``send`` reads may.
    """

    def __init__(
        self, rank: int, sockets: dict[int, socket.socket], *, names: list[int], timeout: float
    ) -> None:
        """
        Args:
            rank: in the group.
            sockets: to each other rank of the group.
            names: of the group's ranks in error messages.
            timeout: seconds.
        """
        self._rank, self._names, self._timeout = rank, names, timeout
        self._sockets = dict(sorted(sockets.items()))
        self._peers = tuple(self._sockets)
        self._peer_of = {each.fileno(): peer for peer, each in sockets.items()}
        self._poll = select.poll()
        for each in sockets.values():
            each.settimeout(timeout)
            self._poll.register(each, select.POLLIN)
        self._gone: set[int] = set()
        # the next message's number, by (peer, tag)
        self._sent, self._expected = defaultdict(itertools.count), defaultdict(itertools.count)
        # (readers, bytes) -> number -> buffer; (sender, number) -> buffer
        self._own: dict[tuple, dict[int, _Buffer]] = defaultdict(dict)
        self._theirs: dict[tuple[int, int], _Buffer] = {}
        self._buffer_numbers = itertools.count()
        # (sender, tag, number) -> buffer, bytes
        self._arrived: dict[tuple[int, int, int], tuple[_Buffer, int]] = {}
        self._sending, self._receiving = threading.Lock(), threading.Lock()

    def all_reduce(self, x: Tensor, op: dist.ReduceOp) -> Work:
        """Sum or maximum, in place. Collective: the group."""
        x = x.detach()
        self._send(x, self._peers, _COLLECTIVE)
        return self._collect(x, lambda parts: _reduce(parts, _REDUCTIONS[op], out=x))

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        """x -> out [t, *x.shape]. Collective: the group."""
        out, x = out.detach(), x.detach()
        self._send(x, self._peers, _COLLECTIVE)
        return self._collect(x, lambda parts: torch.stack(parts, out=out))

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Work:
        """x [t, *out.shape] -> out, the sum of what was for this rank. Collective: the group."""
        out, x = out.detach(), x.detach()
        for peer in self._peers:
            self._send(x[peer], (peer,), _COLLECTIVE)
        return self._collect(x[self._rank], lambda parts: _reduce(parts, torch.add, out=out))

    def all_to_all(self, out: Tensor, x: Tensor) -> Work:
        """x [t, ...], a part for each rank -> out [t, ...], a part from each. Collective: the
        group."""
        out, x = out.detach(), x.detach()
        for peer in self._peers:
            self._send(x[peer], (peer,), _COLLECTIVE)
        return self._collect(x[self._rank], lambda parts: torch.stack(parts, out=out))

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> list[Work]:
        for x, peer in sends:
            self.send(x, peer)
        return [self.recv(out, peer) for out, peer in receives]

    def send(self, x: Tensor, peer: int) -> Work:
        """To a rank of the group, which has to ``recv``. It is done when this returns."""
        self._send(x.detach(), (peer,), _MESSAGE)
        return Work(None)

    def recv(self, out: Tensor, peer: int) -> Work:
        """What a rank of the group sends, which must have the shape and dtype of ``out``."""
        out = out.detach()
        return self._receive((peer,), _MESSAGE, out, lambda parts: out.copy_(parts[0]))

    def close(self) -> None:
        for each in self._sockets.values():
            each.close()

    # -- sending ----------------------------------------------------------------------------------

    def _send(self, x: Tensor, readers: tuple[int, ...], tag: int) -> None:
        with self._sending:
            number, buffer = self._free_buffer(readers, x.nbytes)
            buffer.busy[list(readers)] = 1
            buffer.tensor(x).copy_(x)
            for peer in readers:
                self._note(peer, tag, next(self._sent[peer, tag]), number, x.nbytes)

    def _free_buffer(self, readers: tuple[int, ...], nbytes: int) -> tuple[int, _Buffer]:
        size = max(_SMALLEST, 1 << (nbytes - 1).bit_length())
        buffers = self._own[readers, size]
        for number, buffer in buffers.items():
            if not buffer.busy[: len(self._names)].any():
                return number, buffer
        number = next(self._buffer_numbers)
        fd = os.memfd_create("ds4d")
        try:
            os.ftruncate(fd, _MARKS + size)
            buffers[number] = _Buffer(fd)
            for peer in readers:
                self._note(peer, 0, 0, number, 0, fds=[fd])
        finally:
            os.close(fd)  # what is mapped stays
        return number, buffers[number]

    def _note(self, peer: int, *fields: int, fds: Sequence[int] = ()) -> None:
        """With a file: here is a buffer."""
        try:
            socket.send_fds(self._sockets[peer], [_NOTE.pack(*fields)], fds)
        except ConnectionError as error:
            raise self._ended({peer}) from error

    # -- receiving --------------------------------------------------------------------------------

    def _collect(self, own: Tensor, use: _Use) -> Work:
        """``use`` every rank's part, by rank."""

        def all_parts(parts: list[Tensor]) -> None:
            parts.insert(self._rank, own)
            use(parts)

        return self._receive(self._peers, _COLLECTIVE, own, all_parts)

    def _receive(self, peers: Sequence[int], tag: int, like: Tensor, use: _Use) -> Work:
        """``use`` the next message of each, which must not keep it."""
        wanted = [(peer, tag, next(self._expected[peer, tag])) for peer in peers]

        def finish() -> None:
            with self._receiving:
                self._wait_for(wanted)
                messages = [self._arrived.pop(key) for key in wanted]
            for peer, (_, nbytes) in zip(peers, messages):
                if nbytes != like.nbytes:
                    raise RuntimeError(
                        f"rank {self._names[peer]} sent {nbytes} bytes to rank "
                        f"{self._names[self._rank]}, which expected {like.nbytes}"
                    )
            use([buffer.tensor(like) for buffer, _ in messages])
            for buffer, _ in messages:
                buffer.busy[self._rank] = 0

        return Work(finish)

    def _wait_for(self, wanted: list[tuple[int, int, int]]) -> None:
        while missing := {key[0] for key in wanted if key not in self._arrived}:
            if missing & self._gone:
                raise self._ended(missing & self._gone)
            ready = self._poll.poll(self._timeout * 1000)
            if not ready:
                names = sorted(self._names[peer] for peer in missing)
                raise RuntimeError(f"ranks {names} sent nothing in {self._timeout:.0f} s")
            for fd, _ in ready:
                self._read_note(self._peer_of[fd])

    def _read_note(self, peer: int) -> None:
        try:
            note, fds, *_ = socket.recv_fds(self._sockets[peer], _NOTE.size, 1)
        except ConnectionResetError:
            return  # it left without reading all; what it sent can still be read
        if not note:
            self._gone.add(peer)
            self._poll.unregister(self._sockets[peer])
            return
        tag, message, number, nbytes = _NOTE.unpack(note)
        if fds:
            self._theirs[peer, number] = _Buffer(fds[0])
            os.close(fds[0])
        else:
            self._arrived[peer, tag, message] = self._theirs[peer, number], nbytes

    def _ended(self, peers: set[int]) -> RuntimeError:
        names = sorted(self._names[peer] for peer in peers)
        return RuntimeError(f"ranks {names} ended, or left the group, and others waited for them")


def _reduce(parts: list[Tensor], op: Callable[..., Tensor], out: Tensor) -> None:
    """``out`` may be one of the parts: it is written last."""
    op(functools.reduce(op, parts[:-1]), parts[-1], out=out)


# -- the channel of a group -----------------------------------------------------------------------

_channels: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # group -> Channel or None


def channel_of(group: dist.ProcessGroup) -> Channel | None:
    """None: the ranks share no memory. Closed with the group. Collective, the first time: the
    group."""
    if group not in _channels:
        _channels[group] = channel = _open(group)
        if channel is not None:
            weakref.finalize(group, channel.close)
    return _channels[group]


def _close_all() -> None:
    for channel in filter(None, _channels.values()):
        channel.close()


# a process that reads data would keep the sockets of a rank that has died open
os.register_at_fork(after_in_child=_close_all)


def _open(group: dist.ProcessGroup) -> Channel | None:
    rank, size = group.rank(), group.size()
    with _listen(size) or contextlib.nullcontext() as listener:
        addresses = _everyones(listener and listener.getsockname(), group)
        if None in addresses:
            return None
        sockets = _connect(rank, addresses)
        if not all(_everyones(len(sockets) == rank, group)):
            return None
        for _ in range(rank + 1, size):
            accepted, _ = listener.accept()
            sockets[int.from_bytes(accepted.recv(8))] = accepted
    timeout = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    names = dist.get_process_group_ranks(group)
    channel = Channel(rank, sockets, names=names, timeout=min(timeout, _LONGEST))
    if all(_everyones(_works(channel, size), group)):
        return channel
    channel.close()
    return None


def _everyones(value: object, group: dist.ProcessGroup) -> list:
    """By rank. Collective: the group."""
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def _listen(size: int) -> socket.socket | None:
    """On a name that leaves no file and that no other host has; None: not on this system."""
    if not hasattr(os, "memfd_create"):
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0ds4d-{uuid.uuid4()}")
    listener.listen(size)
    return listener


def _connect(rank: int, addresses: list[bytes]) -> dict[int, socket.socket]:
    """To the lower ranks, as far as they are on this host."""
    sockets = {}
    for peer, address in enumerate(addresses[:rank]):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if connection.connect_ex(address) == 0:
            connection.send(rank.to_bytes(8))
            sockets[peer] = connection
    return sockets


def _works(channel: Channel, size: int) -> bool:
    """Whether memory passes; between containers it may not, though sockets connect."""
    total = torch.ones(1, device="cpu")
    try:
        channel.all_reduce(total, dist.ReduceOp.SUM).wait()
    except (OSError, RuntimeError, KeyError):
        channel.close()  # so that nobody waits for this rank
    return total.item() == size
