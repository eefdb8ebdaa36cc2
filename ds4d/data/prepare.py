"""Everything about data that happens before training: once for all ranks and all runs.

Each rank calls ``prepare``, whether ``torch.distributed`` runs or not: what there is to do is done
by whoever takes the lock of a cache entry first (``cache.py``), and the rest find it done.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Callable, Sequence

from transformers import PreTrainedTokenizerFast

from ds4d.config.types import BatchSizes, DataConfig, RunConfig
from ds4d.data.build import build_text_store
from ds4d.data.cache import Cache, digest
from ds4d.data.corpus import Corpus
from ds4d.data.errors import DataError
from ds4d.data.limits import vocab_size
from ds4d.data.progress import Bar
from ds4d.data.store import SampleStore
from ds4d.data.token_lines import build_token_store
from ds4d.data.tokenizer import fingerprint, get_tokenizer
from ds4d.monitor import screen

FORMAT = 1  # of a store and of what is in it: a change here makes all stores anew


@dataclass(frozen=True)
class PreparedData:
    """Attributes:
    train, eval: None where the run has no such source or it was not asked for.
    tokenizer: None where all samples are token ids and the model brings no tokenizer.
    vocab_size: rows of the model's embedding table; every id is below it.
    report: by ``"train"`` and ``"eval"``: the counts of ``build.py`` and ``store.py``, and the
        cache key, which is equal on all hosts exactly when their data are.
    """

    train: SampleStore | None
    eval: SampleStore | None
    tokenizer: PreTrainedTokenizerFast | None
    vocab_size: int
    report: dict[str, Any]


def prepare(
    run: RunConfig,
    *,
    sources: Sequence[str] = ("train", "eval"),
    local_rank: int = 0,
    progress: bool = True,
) -> PreparedData:
    """Tokenise and pack the run's data, or find that done.

    Args:
        sources: of ``ds4d.data``, which to prepare. A tokenizer is trained on the first.
        local_rank: rank 0 of each host says what was prepared.
        progress: False: say nothing.

    Raises:
        DataError: alike on all ranks.
    """
    say = screen.say if progress and local_rank == 0 else lambda _text: None
    data = run.data
    cache = Cache(data.cache_dir, say=say)
    configs = {name: getattr(data, name) for name in sources if getattr(data, name)}
    corpora = {
        name: Corpus.open(f"ds4d.data.{name}", config, cache) for name, config in configs.items()
    }
    tokenizer = get_tokenizer(
        data.tokenizer,
        run.model,
        next(iter(corpora.values())),
        cache,
        needed=any(config.type != "tokens" for config in configs.values()),
        show=progress,
    )
    asked = data.tokenizer.vocab_size
    if asked and len(tokenizer) < asked:
        say(f"ds4d.data.tokenizer.vocab_size: {asked:,} asked, the text gives {len(tokenizer):,}")
    size = vocab_size(run, tokenizer)
    stores, report = {}, {}
    for name, corpus in corpora.items():
        build = _build(corpus, data, tokenizer, size, show=progress)
        key = _key(corpus, data, tokenizer, size)
        stores[name] = SampleStore(cache.entry(f"samples-{key}", build))
        report[name] = {**stores[name].report, "key": key, "seq_len": data.seq_len}
        say(describe(name, report[name]))
    if "train" in stores:
        check_enough(stores["train"], run.batch)
    return PreparedData(stores.get("train"), stores.get("eval"), tokenizer, size, report)


def check_enough(store: SampleStore, batch: BatchSizes) -> None:
    """A step must find a whole global batch of samples, and something to learn in them."""
    if len(store) < batch.train:
        raise DataError(
            f"ds4d.data.train: {len(store)} samples of {store.seq_len} tokens are fewer than one "
            f"global batch of {batch.train} (train_batch_size); lower the batch, or "
            f"ds4d.data.seq_len, or add data"
        )
    if not store.report["target_tokens"]:
        raise DataError(
            f"ds4d.data.train: none of the {len(store)} samples has a valid target: every label is "
            f"-100, or every sample is one token"
        )


def describe(name: str, report: dict[str, Any]) -> str:
    """One line about a store, for people."""
    lost = [
        f"{report[f'{what}_tokens']:,} {what}"
        for what in ("truncated", "dropped")
        if report[f"{what}_tokens"]
    ]
    odd = [
        f"{report.get(count, 0):,} {what}"
        for count, what in (
            ("empty_documents", "empty documents left out"),
            ("samples_without_target", "samples without a target"),
        )
        if report.get(count, 0)
    ]
    parts = [
        f"{report['documents']:,} documents",
        f"{report['tokens']:,} tokens ({', '.join(lost) or 'all kept'})",
        f"{report['samples']:,} samples of {report['seq_len']:,}",
        f"padding {report['padding_share']:.1%}",
        *odd,
    ]
    return f"data.{name}: {', '.join(parts)}"


def _key(
    corpus: Corpus, data: DataConfig, tokenizer: PreTrainedTokenizerFast | None, size: int
) -> str:
    """Equal exactly when the samples are."""
    settings = {
        "format": FORMAT,
        "corpus": corpus.identity,
        "seq_len": data.seq_len,
        "vocab_size": size,
    }
    if corpus.config.type != "tokens":
        settings |= {
            "tokenizer": fingerprint(tokenizer),
            "packing": data.packing,
            "long_documents": data.long_documents,
            "append_eos": data.append_eos,
        }
    return digest(settings)


def _build(
    corpus: Corpus,
    data: DataConfig,
    tokenizer: PreTrainedTokenizerFast | None,
    size: int,
    *,
    show: bool,
) -> Callable[[Path], None]:
    if corpus.config.type == "tokens":
        build = partial(build_token_store, corpus=corpus, seq_len=data.seq_len)
    else:
        build = partial(build_text_store, corpus=corpus, data=data, tokenizer=tokenizer)

    def make(folder: Path) -> None:
        with Bar(f"reading {corpus.key}", corpus.num_documents, show=show) as bar:
            build(folder, vocab_size=size, bar=bar)

    return make
