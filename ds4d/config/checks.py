"""What is wrong with a file beyond the form of its keys: layout, model, data, length."""

from __future__ import annotations

import glob
from pathlib import Path

from ds4d.config.batch import ACCUMULATION, MICRO, TRAIN, Unsolvable
from ds4d.config.draft import AUTO, Draft
from ds4d.config.errors import Problem, show
from ds4d.config.model_facts import HUB_ID
from ds4d.config.rules import Problems, rule

DEGREES = tuple(f"ds4d.parallel.{axis}" for axis in ("tp", "pp", "cp", "dp"))
SOURCES = ("ds4d.data.train", "ds4d.data.eval")
TOKENIZERS = ("ds4d.data.tokenizer.path", "ds4d.data.tokenizer.vocab_size")
MODELS = ("ds4d.model.path", "ds4d.model.config")

# -- layout and batch -----------------------------------------------------------------------------

@rule(*DEGREES)
def degrees_make_the_world(draft: Draft) -> Problems:
    try:
        draft.dp
    except Unsolvable as error:
        yield Problem(error.path, str(error))


@rule(*DEGREES, TRAIN, MICRO, ACCUMULATION)
def batch_words_fit(draft: Draft) -> Problems:
    try:
        draft.dp
    except Unsolvable:
        return  # said by degrees_make_the_world
    try:
        draft.batch
    except Unsolvable as error:
        yield Problem(error.path, str(error))


@rule("ds4d.model", "ds4d.parallel.tp")
def model_can_be_cut(draft: Draft) -> Problems:
    if draft.degree("tp") > 1 and (reason := draft.why_not_tp):
        yield Problem("ds4d.parallel.tp", reason)


# DeepSpeed makes groups of neighbouring ranks for these, which are those of a tp group.
NOT_WITH_TP = ("zero_hpz_partition_size", "zero_quantized_gradients")


@rule("zero_optimization", "ds4d.parallel.tp")
def zero_groups_fit_tp(draft: Draft) -> Problems:
    for name in NOT_WITH_TP if draft.degree("tp") > 1 else ():
        if (value := draft.given(f"zero_optimization.{name}")) not in (None, False, 1):
            yield Problem(
                f"zero_optimization.{name}",
                f"{show(value)} can't go with ds4d.parallel.tp {draft.degree('tp')}: DeepSpeed "
                "would join ranks that hold parts of one matrix; leave it out",
            )


@rule("ds4d.model", "ds4d.data.seq_len", "ds4d.parallel")
def sequence_can_be_cut(draft: Draft) -> Problems:
    if draft.degree("tp") > 1 and draft.given("ds4d.parallel.sequence_parallel") is True:
        if not draft.why_not_tp and (reason := draft.why_not_sequence_parallel):
            yield Problem("ds4d.parallel.sequence_parallel", f"true: {reason}; set it to false")


# -- model ----------------------------------------------------------------------------------------


@rule("ds4d.model")
def one_model(draft: Draft) -> Problems:
    if len(list(draft.present(*MODELS))) != 1:
        yield Problem(
            "ds4d.model",
            "needs exactly one of path (weights are loaded) and config (weights from scratch)",
        )


@rule("ds4d.model")
def model_is_known(draft: Draft) -> Problems:
    if len(list(draft.present(*MODELS))) == 1:
        yield from draft.model.problems


@rule("ds4d.model", "ds4d.data.seq_len")
def samples_fit_the_positions(draft: Draft) -> Problems:
    seq_len, limit = draft.given("ds4d.data.seq_len"), draft.model.max_positions
    if limit is not None and seq_len > limit:
        yield Problem(
            "ds4d.data.seq_len",
            f"{seq_len} is more than the {limit} positions of the model "
            f"(max_position_embeddings); lower it, or, for a model from scratch, raise that",
        )


@rule("ds4d.model", "ds4d.data.packing", *SOURCES)
def packed_documents_stay_apart(draft: Draft) -> Problems:
    """Attention inside documents only needs a model that goes through ds4d's attention."""
    types = {draft.get(f"{source}.type") for source in draft.present(*SOURCES)}
    if draft.get("ds4d.data.packing") == "documents" and types != {"tokens"}:
        if reason := draft.model.why_not_packed:
            yield Problem("ds4d.data.packing", f'"documents": {reason}; use "concat" or "none"')


# -- data -----------------------------------------------------------------------------------------


@rule(*SOURCES)
def data_files_exist(draft: Draft) -> Problems:
    for source in draft.present(*SOURCES):
        kind, key = draft.given(f"{source}.type"), f"{source}.path"
        paths = draft.given(key)
        patterns = [paths] if isinstance(paths, str) else paths or []
        if kind == "python_stdlib":
            continue
        if not patterns:
            yield Problem(key, f'missing: source type "{kind}" needs a path')
        elif kind == "hf":
            yield from _data_set(key, patterns)
        else:
            yield from _files(key, patterns)


def _data_set(key: str, paths: list[str]) -> Problems:
    if len(paths) > 1:
        yield Problem(key, 'source type "hf" takes one folder or hub id, not a list')
    elif not Path(paths[0]).expanduser().exists() and not HUB_ID.fullmatch(paths[0]):
        yield Problem(key, f"{show(paths[0])} is neither a folder here nor a hub id (owner/name)")


def _files(key: str, patterns: list[str]) -> Problems:
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            yield Problem(key, f"{show(pattern)} is a folder; name its files: {pattern}/*")
        elif not path.exists() and not glob.glob(str(path), recursive=True):
            yield Problem(key, f"no file matches {show(pattern)} (looked from {Path.cwd()})")


@rule(*SOURCES, "ds4d.data.tokenizer", "ds4d.model")
def text_has_a_tokenizer(draft: Draft) -> Problems:
    texts = [s for s in draft.present(*SOURCES) if draft.given(f"{s}.type") != "tokens"]
    if not texts:
        if draft.given("ds4d.model.config.vocab_size") == AUTO:
            yield Problem(
                "ds4d.model.config.vocab_size",
                '"auto" is the size of the tokenizer, and sources of tokens have none; '
                "give the number",
            )
    elif not list(draft.present("ds4d.model.path", *TOKENIZERS)):
        yield Problem(
            "ds4d.data.tokenizer",
            f"missing: {texts[0]} is text; give a path, or a vocab_size to train one",
        )


@rule("ds4d.data.tokenizer", "ds4d.model.config.vocab_size")
def tokenizer_fits_the_model(draft: Draft) -> Problems:
    size = draft.given("ds4d.data.tokenizer.vocab_size")
    rows = draft.number("ds4d.model.config.vocab_size")
    if size is not None and draft.given("ds4d.data.tokenizer.path") is not None:
        yield Problem("ds4d.data.tokenizer", "needs path or vocab_size, not both")
    if size is not None and rows is not None and size > rows:
        yield Problem(
            "ds4d.data.tokenizer.vocab_size",
            f"{size} is more than ds4d.model.config.vocab_size {rows}; the model would lack rows",
        )


# -- training -------------------------------------------------------------------------------------


@rule("ds4d.training.steps", "ds4d.training.epochs")
def one_length(draft: Draft) -> Problems:
    given = list(draft.present("ds4d.training.steps", "ds4d.training.epochs"))
    if len(given) != 1:
        yield Problem("ds4d.training", f"needs exactly one of steps and epochs, has {len(given)}")


@rule("ds4d.training.eval_every", "ds4d.data.eval")
def evaluation_has_data(draft: Draft) -> Problems:
    if draft.given("ds4d.training.eval_every") and draft.given("ds4d.data.eval") is None:
        yield Problem(
            "ds4d.data.eval",
            f"missing: ds4d.training.eval_every is {draft.given('ds4d.training.eval_every')}, "
            f"and there is nothing to evaluate on",
        )


@rule("scheduler", "ds4d.training")
def schedule_has_a_length(draft: Draft) -> Problems:
    if draft.given("scheduler.params.total_num_steps") == AUTO:
        if draft.given("ds4d.training.steps") is None:
            yield Problem(
                "scheduler.params.total_num_steps",
                '"auto" is ds4d.training.steps, which is not given; give the number, or take '
                'scheduler.type "linear" or "cosine", which work with epochs',
            )
    warmups = draft.present("scheduler.params.warmup_steps", "scheduler.params.warmup_ratio")
    if len(list(warmups)) > 1:
        yield Problem("scheduler.params", "needs warmup_steps or warmup_ratio, not both")
