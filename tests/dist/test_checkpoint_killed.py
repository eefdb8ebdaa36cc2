"""Killed at any instant, the newest complete checkpoint loads and training goes past the step.

Each test runs in one process that has everything imported and forks the ranks to be killed, so
that a trial costs milliseconds.
"""

import datetime
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
import traceback
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

from ds4d.checkpoint.find import find
from ds4d.checkpoint.load import load
from ds4d.checkpoint.logical import LogicalTensor, Piece
from ds4d.checkpoint.save import save
from tests.harness import PRELOAD

TRIALS = 20
COUNT = 500_000  # elements a rank: a save takes some tens of milliseconds
KILLED = -signal.SIGKILL
FORK = multiprocessing.get_context("fork")


def in_a_fresh_process(test, *args):
    """Forking is safe only where no thread runs, which pytest's process cannot promise."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(test, args, theirs))
    process.start()
    theirs.close()
    if failure := ours.recv():
        pytest.fail(failure)
    process.join()


def _run(test, args, pipe):
    torch.set_num_threads(1)
    try:
        test(*args)
        pipe.send(None)
    except BaseException:
        pipe.send(traceback.format_exc())


def state_of(step, rank, world_size):
    """Each rank's half of one tensor, and a replicated one."""
    mine = Piece((rank * COUNT,), torch.full((COUNT,), float(step)))
    shared = Piece((0,), torch.full((100,), float(step)))
    return {
        "weight/cut": LogicalTensor((world_size * COUNT,), torch.float32, (mine,)),
        "weight/shared": LogicalTensor((100,), torch.float32, (shared,)),
    }


def store(root, step, rank=0, world_size=1):
    state = state_of(step, rank, world_size)
    save(root, step, state, extra={"step": step}, rank_state={"rank": rank}, keep=1)


def recover(root, rank=0, world_size=1):
    """The step of the newest complete checkpoint, all of which is right; 0 where there is none."""
    folder = find(root, "auto")
    if folder is None:
        return 0
    state = state_of(0, rank, world_size)
    extra, rank_state = load(folder, state, verify=True)
    assert rank_state == {"rank": rank}
    for tensor in state.values():
        assert torch.all(tensor.pieces[0].tensor == extra["step"])
    return extra["step"]


def train(root, store_path, rank, pipe):
    """Resume, report the step, then save the next step whenever told to."""
    timeout = datetime.timedelta(seconds=30)
    meeting = dist.FileStore(store_path, 2)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=2, timeout=timeout)
    step = recover(root, rank, 2)
    pipe.send(step)
    while pipe.recv() == "save":
        step += 1
        store(root, step, rank, 2)
        pipe.send(step)


def start(function, *args):
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=function, args=(*args, theirs))
    process.start()
    theirs.close()
    return process, ours


def wait_for(process, seconds=20):
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
        return None
    return process.exitcode


def tell(ranks, word):
    for _, pipe in ranks:
        with suppress(OSError):  # it may have died of the other's death
            pipe.send(word)


def resume(root, meeting):
    """Two ranks that have loaded the newest checkpoint, and its step."""
    ranks = [start(train, root, str(meeting), rank) for rank in range(2)]
    first, second = [pipe.recv() for _, pipe in ranks]
    assert first == second
    return ranks, first


def save_undisturbed(root, meeting):
    """The step that was saved, and the seconds that took."""
    ranks, step = resume(root, meeting)
    begin = time.monotonic()
    tell(ranks, "save")
    assert [pipe.recv() for _, pipe in ranks] == [step + 1, step + 1]
    seconds = time.monotonic() - begin
    tell(ranks, "stop")
    assert [wait_for(process) for process, _ in ranks] == [0, 0]
    return step + 1, seconds


def random_moments(root):
    rng = random.Random(0)
    done, seconds = save_undisturbed(root, root / "store-first")
    for trial in range(TRIALS):
        ranks, step = resume(root, root / f"store-{trial}")
        assert step in (done, done + 1)  # the save that was hit may have got through
        done = step
        tell(ranks, "save")
        time.sleep(rng.uniform(0, seconds))
        victims = rng.choice([ranks, ranks[:1], ranks[1:]])
        for process, _ in victims:
            process.kill()
        tell([each for each in ranks if each not in victims], "stop")
        codes = [wait_for(process) for process, _ in ranks]
        assert None not in codes, f"trial {trial}: a rank hangs after the other was killed"
        assert KILLED in codes, f"trial {trial}: nothing was killed"
    step, _ = save_undisturbed(root, root / "store-last")
    assert step in (done + 1, done + 2)
    assert sorted(os.listdir(root / "checkpoints")) == ["latest", f"step-{step:08d}"]


def test_sigkill_at_random_moments(tmp_path):
    in_a_fresh_process(random_moments, tmp_path)


# what Python reports of itself: every crash point lies between two of these
FILE_EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}


def die_at(root, step, event, pipe):
    """Save, killed right before the ``event``-th act on the file system under ``root``."""
    place, acts = str(root), 0

    def hook(name, args):
        nonlocal acts
        if name in FILE_EVENTS and str(args[0]).startswith(place):
            acts += 1
            if acts == event:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    store(root, step)


def every_act(root, again):
    store(root / "before", 1)
    event, code = 0, KILLED
    while code == KILLED:
        event += 1
        run = root / str(event)
        shutil.copytree(root / "before", run)
        code = wait_for(start(die_at, run, 1 if again else 2, event)[0])
        step = recover(run)
        assert step in (1, 1 if again else 2), f"killed before act {event}"
        store(run, step + 1)
        assert recover(run) == step + 1
        assert sorted(os.listdir(run / "checkpoints")) == ["latest", f"step-{step + 1:08d}"]
        shutil.rmtree(run)
    assert code == 0 and event > 20


@pytest.mark.parametrize("again", [False, True], ids=["next step", "same step"])
def test_killed_before_every_act_on_the_file_system(tmp_path, again):
    """Each crash point in turn, with ``keep`` 1: there is one other checkpoint, or, when a step is
    saved again, none."""
    in_a_fresh_process(every_act, tmp_path, again)
