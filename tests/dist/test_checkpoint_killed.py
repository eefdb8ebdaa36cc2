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
from ds4d.monitor.metrics import read_metrics
from tests.dist.test_trainer import TINY_GPT2, config, corpus, curve  # noqa: F401
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


def train_rank(file, output, rank, meeting, pipe):
    from tests.dist.test_trainer import job
    from tests.harness import _enter

    log = open(output / f"log-{rank}.txt", "a")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    try:
        _enter(rank, 4, str(meeting))
        job(file, output, resume="auto")
        os._exit(0)  # as run_rank ends
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def start_ranks(file, output, meeting):
    for folder in (output, meeting):
        folder.mkdir(parents=True, exist_ok=True)
    return [start(train_rank, file, output, rank, meeting)[0] for rank in range(4)]


def steps_done(output):
    with suppress(FileNotFoundError):
        return len(read_metrics(output / "metrics.jsonl"))
    return 0


def train_undisturbed(file, output, meeting):
    codes = [wait_for(rank, 300) for rank in start_ranks(file, output, meeting)]
    assert codes == [0] * 4, (output / "log-0.txt").read_text()[-2000:]
    return curve(read_metrics(output / "metrics.jsonl"))


def kill_training(root, file, trials):
    """By turns beside the training and at once; what was saved is never lost, no rank hangs, and
    at the end the steps are those of a run that nobody killed, to the bit."""
    rng, output, checkpoints = random.Random(trials), root / "run", file["ds4d"]["checkpoint"]
    done = 0
    for trial in range(trials):
        checkpoints["async"] = trial % 2 == 0
        ranks = start_ranks(file, output, root / f"meeting-{trial}")
        deadline, wanted = time.monotonic() + 300, done + rng.randint(2, 4)
        while steps_done(output) < wanted:
            assert time.monotonic() < deadline and all(rank.is_alive() for rank in ranks), (
                f"trial {trial}: " + (output / "log-0.txt").read_text()[-2000:]
            )
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.1))
        for victim in rng.choice([ranks, [rng.choice(ranks)]]):
            victim.kill()
        assert None not in [wait_for(rank, 120) for rank in ranks], f"trial {trial}: a rank hangs"
        newest = find(output, "auto")
        step = int(newest.name.partition("-")[2]) if newest else 0
        assert step >= max(done, wanted - 2), f"trial {trial}: {step} after {done} and {wanted}"
        done = step
    file["ds4d"]["training"]["steps"] = done + 2
    walked = train_undisturbed(file, output, root / "meeting-last")
    checkpoints |= {"every": None, "final": False}
    assert walked == train_undisturbed(file, root / "whole", root / "meeting-whole")
    assert sorted(os.listdir(output / "checkpoints")) == ["latest", f"step-{done + 2:08d}"]


@pytest.mark.parametrize("trials", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_training_in_4d_killed_at_random_moments(corpus, tmp_path, trials):  # noqa: F811
    file = config(
        corpus, model=TINY_GPT2, parallel={"tp": 2, "pp": 2},
        training={"steps": 10_000, "eval_every": None}, checkpoint={"every": 1, "keep": 1},
    )  # fmt: skip
    del file["scheduler"]
    in_a_fresh_process(kill_training, tmp_path, file, trials)
