"""The demo's data: real English text that every CPython carries, with a tokenizer trained on it.

``pydoc_data.topics`` is the text behind ``help("TOPIC")``: about 80 topics, half a million characters. Each
topic is one document; a byte-level BPE is trained on them; the data set is written by the same function that
``megatron-recover prepare-data`` uses. No network, a few seconds, and nothing is done again while up to date.

    python scripts/demo/prepare.py [--dir data/demo] [--vocab-size 2048]
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_recover.errors import UserError
from megatron_recover.prepare_data import write_dataset

END_OF_TEXT = "<|endoftext|>"
DEFAULT_DIR = Path("data/demo")
DEFAULT_VOCAB_SIZE = 2048
_MIN_VOCAB_SIZE = 257
"""A byte-level vocabulary holds the 256 bytes and the end-of-text token at least."""
_RECIPE = 1
"""Raised whenever this file makes something else of the same text."""


@dataclass(frozen=True, slots=True)
class DemoData:
    """Where the demo's data lies."""

    prefix: Path
    """For ``--data-path``."""
    tokenizer: Path
    """For ``--tokenizer-model``, with ``--tokenizer-type HuggingFaceTokenizer``."""
    documents: int
    tokens: int
    made: bool
    """False when everything was there already."""


def documents() -> list[str]:
    """The topics' texts, in the order of their names."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def prepare(directory: Path = DEFAULT_DIR, vocab_size: int = DEFAULT_VOCAB_SIZE) -> DemoData:
    """Make the tokenizer and the data set under ``directory`` unless they are up to date.

    Safe to call from two processes at once. Interrupted work is done again: the stamp is written last.

    Raises:
        UserError: the vocabulary is too small, or the folder cannot be written.
    """
    if vocab_size < _MIN_VOCAB_SIZE:
        raise UserError(
            f"--vocab-size {vocab_size}: give at least {_MIN_VOCAB_SIZE} (256 bytes and {END_OF_TEXT})."
        )
    texts = documents()
    # a tokenizer saved by one major version of transformers need not load in another
    recipe = [_RECIPE, importlib.metadata.version("transformers"), vocab_size, texts]
    digest = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()
    stamp = directory / "stamp.json"
    prefix, tokenizer = directory / "corpus", directory / "tokenizer"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / ".lock"):
            known = _read_stamp(stamp)
            if known.get("digest") == digest and prefix.with_suffix(".idx").exists() and tokenizer.is_dir():
                return DemoData(prefix, tokenizer, int(known["documents"]), int(known["tokens"]), made=False)
            stamp.unlink(missing_ok=True)
            train_tokenizer(texts, tokenizer, vocab_size)
            summary = write_dataset(texts, str(tokenizer), prefix, overwrite=True, show_progress=False)
            record = {"digest": digest, "documents": summary.documents, "tokens": summary.tokens}
            stamp.write_text(json.dumps(record) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--dir {directory}: cannot be written ({error.strerror or error}).") from error
    return DemoData(prefix, tokenizer, summary.documents, summary.tokens, made=True)


def train_tokenizer(texts: list[str], folder: Path, vocab_size: int) -> None:
    """Train a byte-level BPE on ``texts`` and save it as ``AutoTokenizer`` expects it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # every byte, so that no text is unknown
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END_OF_TEXT).save_pretrained(str(folder))


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Make the demo's tokenizer and data set (idempotent).")
    parser.add_argument("--dir", type=Path, default=DEFAULT_DIR, help=f"folder (default: {DEFAULT_DIR})")
    parser.add_argument(
        "--vocab-size", type=int, default=DEFAULT_VOCAB_SIZE, help="tokens (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    try:
        data = prepare(args.dir, args.vocab_size)
    except UserError as error:
        print(f"prepare: {error}", file=sys.stderr)
        return int(error.exit_code)
    state = "made" if data.made else "up to date"
    print(f"{data.prefix} ({state}): {data.documents:,} documents, {data.tokens:,} tokens")
    print(
        f"  --data-path {data.prefix} --tokenizer-type HuggingFaceTokenizer "
        f"--tokenizer-model {data.tokenizer}"
    )
    return 0


def _read_stamp(stamp: Path) -> dict[str, Any]:
    try:
        known = json.loads(stamp.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; a process that dies lets go of it."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main())
