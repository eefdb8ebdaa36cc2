"""Many processes on one cache: one makes it, the others wait, and a killed one is followed."""

from __future__ import annotations

import hashlib
import multiprocessing as mp
import os
import signal
import time
from pathlib import Path

import pytest

from ds4d.config.types import SourceConfig
from ds4d.data import prepare as prepare_module
from ds4d.data.errors import DataError
from ds4d.data.prepare import prepare
from tests.harness import run_distributed
from tests.unit.data_cases import prose, run_config, write_lines

RANKS = 4
FAR_LONGER_THAN_A_TEST = 600


@pytest.fixture()
def source(tmp_path):
    lines = [{"text": prose(30, seed % 50)} for seed in range(2000)]
    return SourceConfig(type="jsonl", path=str(write_lines(tmp_path / "a.jsonl", lines)))


def prepare_and_log(cache: Path, source: SourceConfig, log: Path, slow: float, fail: bool = False):
    """What a rank does; each making of samples is one line in ``log``."""
    real = prepare_module.build_text_store

    def logged(folder, **arguments):
        with open(log, "a") as file:
            file.write("made\n")
        real(folder, **arguments)
        time.sleep(slow)
        if fail:
            raise DataError(f"line {os.getpid()} is damaged")

    prepare_module.build_text_store = logged
    try:
        data = prepare(run_config(cache, source), progress=False)
    except DataError as error:
        return str(error)
    finally:
        prepare_module.build_text_store = real
    content = hashlib.sha256()
    for i in range(len(data.train)):
        content.update(data.train[i].input_ids.numpy().tobytes())
    tokenizer = data.tokenizer.backend_tokenizer.to_str()
    return data.report["train"]["key"], tokenizer, content.hexdigest()


def prepare_on_own_host(root: Path, source: SourceConfig, log: Path):
    return prepare_and_log(root / f"host-{int(os.environ['RANK']) // 2}", source, log, slow=0)


def test_ranks_on_an_empty_cache_prepare_once(tmp_path, source):
    log = tmp_path / "log"
    results = run_distributed(
        prepare_and_log, RANKS, cache=tmp_path / "cache", source=source, log=log, slow=1.0
    )
    assert log.read_text() == "made\n"
    assert len(set(results)) == 1


def test_hosts_without_a_shared_folder_prepare_the_same_once_each(tmp_path, source):
    log = tmp_path / "log"
    results = run_distributed(prepare_on_own_host, RANKS, root=tmp_path, source=source, log=log)
    assert log.read_text() == "made\n" * 2
    assert len(set(results)) == 1  # a tokenizer trained twice is the same twice


def test_an_error_is_found_once_and_raised_by_all(tmp_path, source):
    log = tmp_path / "log"
    results = run_distributed(
        prepare_and_log, RANKS,
        cache=tmp_path / "cache", source=source, log=log, slow=2.0, fail=True,
    )  # fmt: skip
    assert log.read_text() == "made\n" and len(set(results)) == 1 and "is damaged" in results[0]
    again = prepare_and_log(tmp_path / "cache", source, log, slow=0)
    assert len(again) == 3 and log.read_text() == "made\n" * 2  # a later run tries anew


def test_a_killed_preparer_leaves_nothing_and_the_next_takes_over(tmp_path, source):
    cache, log = tmp_path / "cache", tmp_path / "log"
    context = mp.get_context("forkserver")
    arguments = (cache, source, log, FAR_LONGER_THAN_A_TEST)
    preparer = context.Process(target=prepare_and_log, args=arguments, daemon=True)
    preparer.start()
    making = _wait_for(lambda: list(cache.glob("samples-*making*/store.json")))
    with context.Pool(1) as pool:
        waiting = pool.apply_async(prepare_and_log, (cache, source, log, 0))
        with pytest.raises(mp.TimeoutError):
            waiting.get(timeout=3)
        os.kill(preparer.pid, signal.SIGKILL)
        preparer.join()
        result = waiting.get(timeout=100)
    assert log.read_text() == "made\n" * 2
    assert making and not list(cache.glob("*making*"))
    assert prepare_and_log(cache, source, log, 0) == result and log.read_text() == "made\n" * 2


def _wait_for(condition, seconds: float = 100):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.1)
    return found
