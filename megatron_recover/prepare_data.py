"""``megatron-recover prepare-data``: text or a Hugging Face data set into Megatron's ``.bin``/``.idx`` pair.

Documents are streamed (never all in memory), tokenised in batches and written with Megatron's own
``IndexedDatasetBuilder``. Special tokens are treated as Megatron's ``HuggingFaceTokenizer`` and its
``tools/preprocess_data.py`` treat them, so training sees the same ids. Heavy imports happen inside functions:
``megatron-recover --help`` must not load torch.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_recover.errors import UserError
from megatron_recover.progress import Counter
from megatron_recover.text_sources import add_source_arguments, open_documents

if TYPE_CHECKING:
    import numpy

_BATCH_DOCUMENTS = 512
_BATCH_CHARACTERS = 2_000_000
_DEFAULT_VALIDATION_SHARE = 0.03
"""Megatron's default ``--split 969,30,1`` gives this share of the documents to validation."""


@dataclass(frozen=True, slots=True)
class DataSummary:
    """What was written."""

    prefix: Path
    """Path of the pair without ``.bin``/``.idx``: the value for Megatron's ``--data-path``."""
    documents: int
    tokens: int
    """Number of tokens, end-of-document tokens included."""
    empty: int
    """Documents left out because they hold no text."""
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``prepare-data`` to ``parser``."""
    add_source_arguments(parser)
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="PATH_OR_NAME",
        help="folder or hub name of a tokenizer that transformers.AutoTokenizer loads",
    )
    parser.add_argument("--out", required=True, metavar="PREFIX", help="write PREFIX.bin and PREFIX.idx")
    parser.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end each document with the tokenizer's end-of-text token (default: yes)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="processes that tokenise (default 1: this process; a fast tokenizer uses every core already)",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace PREFIX.bin, PREFIX.idx and Megatron's index cache of it",
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="let the tokenizer's repository run its own Python code",
    )


def main(args: argparse.Namespace) -> int:
    """Run ``prepare-data`` with parsed arguments; returns the exit code.

    Raises:
        UserError: an input, the tokenizer or the output cannot be used.
    """
    if args.workers < 1:
        raise UserError(f"--workers {args.workers}: give 1 or more.")
    prefix = _output_prefix(args.out)
    _refuse_existing(prefix, args.overwrite)
    documents, total = open_documents(args)
    summary = write_dataset(
        documents,
        args.tokenizer,
        prefix,
        append_eod=args.append_eod,
        workers=args.workers,
        overwrite=args.overwrite,
        trust_remote_code=args.trust_remote_code,
        total=total,
    )
    _print_summary(summary, args.tokenizer)
    return 0


def write_dataset(
    documents: Iterable[str],
    tokenizer_path: str,
    prefix: str | Path,
    *,
    append_eod: bool = True,
    workers: int = 1,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    total: int | None = None,
    show_progress: bool = True,
) -> DataSummary:
    """Tokenise ``documents`` and write ``prefix.bin`` and ``prefix.idx``.

    Both files are written under a temporary name and renamed at the end, the index last: where there is an
    ``.idx``, there is a whole data set.

    Args:
        documents: the texts, consumed once, in order.
        tokenizer_path: folder or hub name for ``AutoTokenizer``.
        prefix: path without suffix; its folder is made when missing.
        append_eod: end each document with the tokenizer's end-of-text token.
        workers: number of processes that tokenise; 1 means this one.
        overwrite: replace an existing pair, and drop Megatron's index cache of the old one.
        trust_remote_code: passed to ``AutoTokenizer``.
        total: number of documents where known, for the progress bar.
        show_progress: show a progress bar on a terminal, or a line now and then elsewhere.

    Raises:
        UserError: the tokenizer cannot be loaded or has no end-of-text token, the pair exists, there is no
            text, or the disk refuses.
    """
    prefix = _output_prefix(prefix)
    _refuse_existing(prefix, overwrite)
    tokenizer = load_tokenizer(tokenizer_path, trust_remote_code)
    eod = end_of_document_id(tokenizer, tokenizer_path) if append_eod else None
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {prefix}: cannot make its folder ({error.strerror or error}).") from error

    indexed_dataset = _megatron_indexed_dataset()
    started = time.monotonic()
    dtype = indexed_dataset.DType.optimal_dtype(len(tokenizer))
    part_bin, part_idx = (
        prefix.with_name(f"{prefix.name}.{os.getpid()}.{kind}.part") for kind in ("bin", "idx")
    )
    written = tokens = empty = 0
    try:
        builder = indexed_dataset.IndexedDatasetBuilder(str(part_bin), dtype=dtype)
        try:
            with Counter(
                "Tokenising", total, units=("documents", "tokens"), enabled=show_progress
            ) as counter:
                for ids in _encode(documents, tokenizer, tokenizer_path, eod, workers, trust_remote_code):
                    if len(ids) == 0:
                        empty += 1
                    else:
                        builder.add_document(ids, [len(ids)])
                        written += 1
                        tokens += len(ids)
                    counter.update(written + empty, tokens)
        finally:
            builder.data_file.close()
        if written == 0:
            raise UserError(
                "The input holds no text: nothing was written; check --text, or --split and --column."
            )
        builder.finalize(str(part_idx))
        _publish(prefix, part_bin, part_idx)
    except OSError as error:
        raise UserError(f"--out {prefix}: cannot write the data set ({error.strerror or error}).") from error
    finally:
        for part in (part_bin, part_idx):
            part.unlink(missing_ok=True)
    return DataSummary(prefix, written, tokens, empty, time.monotonic() - started)


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer that training will use, with its length warning off.

    Raises:
        UserError: not found on disk or on the hub, or not loadable.
    """
    local = Path(path).expanduser()
    if not local.exists() and (path.startswith((".", "/", "~")) or path.count("/") > 1):
        raise UserError(f"--tokenizer {path}: there is no such folder.")

    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(local) if local.exists() else path, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # transformers raises many types here, from OSError to KeyError
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"--tokenizer {path}: cannot be loaded ({reason[0].rstrip('.')}); give a folder with the "
            "tokenizer's files, or a hub name while there is a network or the files are in its cache."
        ) from error
    tokenizer.model_max_length = 1 << 60  # documents are cut into samples by Megatron, not here
    return tokenizer


def end_of_document_id(tokenizer: Any, path: str) -> int:
    """Id that ends a document: ``eos_token`` or else ``sep_token``, as in Megatron's HuggingFaceTokenizer.

    Raises:
        UserError: the tokenizer has neither.
    """
    token = tokenizer.eos_token or tokenizer.sep_token
    if token is None:
        raise UserError(
            f"--tokenizer {path}: it has no end-of-text token (eos_token); set one in its "
            "tokenizer_config.json, or pass --no-append-eod."
        )
    return int(tokenizer.convert_tokens_to_ids(token))


def encode_batch(tokenizer: Any, texts: list[str], eod: int | None) -> list[numpy.ndarray]:
    """Token ids of each text, shape ``(length,)``, int32; empty where the text holds nothing but white space.

    Special tokens that the tokenizer adds by itself are kept; ``eod`` is not added where the ids end with it.
    """
    import numpy

    encoded = []
    filled = [text for text in texts if text.strip()]
    ids_of_filled = iter(tokenizer(filled, return_attention_mask=False)["input_ids"] if filled else [])
    for text in texts:
        ids: list[int] = next(ids_of_filled) if text.strip() else []
        if ids and eod is not None and ids[-1] != eod:
            ids = [*ids, eod]
        encoded.append(numpy.array(ids, dtype=numpy.int32))
    return encoded


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Group documents so that a batch is neither many documents nor many characters."""
    batch: list[str] = []
    characters = 0
    for text in documents:
        batch.append(text)
        characters += len(text)
        if len(batch) >= _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode(
    documents: Iterable[str],
    tokenizer: Any,
    path: str,
    eod: int | None,
    workers: int,
    trust_remote_code: bool,
) -> Iterator[numpy.ndarray]:
    """Token ids of every document, in order, with a bounded number of batches in flight."""
    if workers == 1:
        for batch in _batches(documents):
            yield from encode_batch(tokenizer, batch, eod)
        return

    import multiprocessing

    # "spawn": this process has threads (Arrow, the tokenizer's pool); a fork would copy them amid their work.
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(path, eod, trust_remote_code),
    )
    pending: deque[Future[list[numpy.ndarray]]] = deque()
    try:
        for batch in _batches(documents):
            pending.append(pool.submit(_encode_in_worker, batch))
            if len(pending) >= 2 * workers:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            f"--workers {workers}: a tokenising process died, mostly for want of memory; use fewer workers."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker: tuple[Any, int | None] | None = None


def _start_worker(path: str, eod: int | None, trust_remote_code: bool) -> None:
    """Load the tokenizer in a worker; Ctrl-C is for the parent, which stops the pool."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = (load_tokenizer(path, trust_remote_code), eod)


def _encode_in_worker(texts: list[str]) -> list[numpy.ndarray]:
    assert _worker is not None
    tokenizer, eod = _worker
    return encode_batch(tokenizer, texts, eod)


def _megatron_indexed_dataset() -> Any:
    """Import Megatron's data set module without its remarks on CUDA and Apex, which do not matter here."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.core.datasets import indexed_dataset
    finally:
        logging.disable(logging.NOTSET)
    return indexed_dataset


def _output_prefix(out: str | Path) -> Path:
    """The prefix as a path, without a ``.bin`` or ``.idx`` that was typed along."""
    prefix = Path(out).expanduser()
    if prefix.suffix in (".bin", ".idx"):
        prefix = prefix.with_suffix("")
    if str(out).endswith("/") or not prefix.name:
        raise UserError(f"--out {out}: give a file prefix, for example {Path(out) / 'corpus'}.")
    return prefix


def _with_suffix(prefix: Path, suffix: str) -> Path:
    """``prefix`` plus ``suffix``, also where the prefix itself holds a dot."""
    return prefix.with_name(prefix.name + suffix)


def _refuse_existing(prefix: Path, overwrite: bool) -> None:
    if not overwrite and _with_suffix(prefix, ".idx").exists():
        raise UserError(f"--out {prefix}: {prefix}.idx exists already; pass --overwrite to replace it.")


def _publish(prefix: Path, part_bin: Path, part_idx: Path) -> None:
    """Give the finished files their names. The old index goes first: it must never meet the new data."""
    for part in (part_bin, part_idx):
        with part.open("rb") as file:
            os.fsync(file.fileno())
    _with_suffix(prefix, ".idx").unlink(missing_ok=True)
    # Megatron keeps sample indices of this data set in PREFIX/cache, keyed by path and not by content.
    shutil.rmtree(prefix / "cache", ignore_errors=True)
    part_bin.replace(_with_suffix(prefix, ".bin"))
    part_idx.replace(_with_suffix(prefix, ".idx"))


def _print_summary(summary: DataSummary, tokenizer: str) -> None:
    size = _with_suffix(summary.prefix, ".bin").stat().st_size / 2**20
    rate = summary.tokens / max(summary.seconds, 1e-9)
    print(f"Wrote {summary.prefix}.bin ({size:,.1f} MiB) and {summary.prefix}.idx:")
    print(
        f"  {summary.documents:,} documents, {summary.tokens:,} tokens in {summary.seconds:.1f} s "
        f"({rate:,.0f} tokens/s)"
    )
    if summary.empty:
        print(f"  {summary.empty:,} documents without text left out")
    print("Train on it with:")
    print(
        f"  --data-path {summary.prefix} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {tokenizer}"
    )
    if summary.documents * _DEFAULT_VALIDATION_SHARE < 1:
        print(
            f"Note: Megatron's --split divides whole documents; with {summary.documents} of them its default "
            "leaves none for validation: use --split 100,0,0 with --eval-iters 0, or more documents."
        )
