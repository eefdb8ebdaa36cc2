"""Packed documents make the work of a row uneven: how evenly a cut shares it."""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path

import pytest
import torch

from ds4d.attention.documents import Documents
from ds4d.context_parallel import Cutter, zigzag
from ds4d.data.batch import MicroBatch

LIMIT = 0.15  # over the mean, of the busiest place


def lognormal(mean: float, sigma: float):
    """Lengths of documents."""

    def draw(generator: torch.Generator) -> int:
        z = float(torch.randn((), generator=generator))
        return round(mean * math.exp(sigma * z - sigma**2 / 2))

    return draw


def python_stdlib(generator: torch.Generator) -> int:
    return _STDLIB[int(torch.randint(len(_STDLIB), (), generator=generator))] // 4


_STDLIB = sorted(p.stat().st_size for p in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
MIXES = {
    "short": lognormal(600, 1.0),
    "short, heavy tail": lognormal(600, 1.5),
    "long": lognormal(3000, 1.2),
    "python_stdlib": python_stdlib,
}


def filled(draw, length: int, generator: torch.Generator) -> list[int]:
    """The documents of a row; the last one is cut off."""
    row: list[int] = []
    while (left := length - sum(row)) > 0:
        row.append(min(left, max(1, draw(generator))))
    return row


def one_long(share: float, length: int, generator: torch.Generator) -> list[int]:
    """Somewhere among documents of 64 tokens."""
    row = [64] * round(length * (1 - share) / 64)
    row.insert(int(torch.randint(len(row) + 1, (), generator=generator)), length - sum(row))
    return row


def batch_of(rows: list[list[int]]) -> MicroBatch:
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    ids = torch.stack([torch.arange(len(r)).repeat_interleave(torch.tensor(r)) for r in rows])
    documents = Documents.from_ids(ids, positions)
    return MicroBatch(
        torch.zeros_like(positions), torch.zeros_like(positions), positions, documents
    )


def imbalance(spans, positions: torch.Tensor) -> float:
    """A token sees as many keys as its position says, and itself."""
    seen = (positions + 1).sum(0).double()
    loads = torch.stack([sum(seen[start:stop].sum() for start, stop in held) for held in spans])
    return float(loads.max() / loads.mean()) - 1


def cuts(cp: int):
    """(a mix, its batch, the cut) of some batches of each mix."""
    for length, count in ((8192, 1), (8192, 4), (32768, 1), (32768, 4)):
        for seed in range(2):
            generator = torch.Generator().manual_seed(seed)
            rows = {
                name: [filled(draw, length, generator) for _ in range(count)]
                for name, draw in MIXES.items()
            }
            for share in (0.3, 0.5, 0.8):
                rows[f"one of {share}"] = [one_long(share, length, generator) for _ in range(count)]
            for name, lengths in rows.items():
                batch = batch_of(lengths)
                yield (name, length, count, seed), batch, Cutter(0, cp)(batch).cut


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_documents_are_shared_evenly(cp):
    """What the cut says of itself is so, and is under the limit, where zigzag's is not."""
    found, of_zigzag = [], []
    for case, batch, cut in cuts(cp):
        held = [sum(stop - start for start, stop in spans) for spans in cut.spans]
        assert held == [batch.input_ids.shape[1] // cp] * cp, case
        assert cut.imbalance == pytest.approx(imbalance(cut.spans, batch.position_ids)), case
        found.append(cut.imbalance)
        of_zigzag.append(imbalance(zigzag(cut.length, cp), batch.position_ids))
        assert cut.imbalance <= of_zigzag[-1] + 1e-9, case
    assert max(found) < LIMIT < 0.3 < max(of_zigzag)


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_rows_of_one_document_are_shared_to_the_pair(cp):
    positions = torch.arange(256)[None]
    cut = Cutter(0, cp)(MicroBatch(positions, positions, positions)).cut
    assert cut.spans == zigzag(256, cp)
    assert imbalance(cut.spans, positions) == cut.imbalance == 0
