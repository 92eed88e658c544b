"""Where ``prepare-data`` gets its documents: plain text files or a Hugging Face data set.

Both are read by ``datasets`` in streaming mode, so size does not matter and nothing is copied into its cache.
"""

from __future__ import annotations

import argparse
import glob
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_recover.errors import UserError

_SAMPLE_BY = {"file": "document", "paragraph": "paragraph", "line": "line"}
"""Our words for a document's extent, and what the ``text`` builder of ``datasets`` calls them."""

_BUILDER_OF_SUFFIX = {
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".arrow": "arrow",
}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_MAX_FILE_DOCUMENT_BYTES = 1 << 30
"""A document is held in memory; a file above this size must be cut into several."""


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the input to ``parser``."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--text", nargs="+", metavar="FILE", help="plain UTF-8 text files (.gz, .xz, .bz2 too)"
    )
    source.add_argument(
        "--hf-dataset",
        metavar="NAME_OR_PATH",
        help="data set on the Hugging Face hub, or a local folder (data files, or made by save_to_disk) or "
        "a .jsonl, .parquet, .csv or .arrow file",
    )
    parser.add_argument(
        "--document",
        choices=tuple(_SAMPLE_BY),
        default=None,
        help="with --text, what one document is: a whole file (default), a paragraph (blank lines between "
        "documents), or a line. Documents are what --append-eod ends and what Megatron's --split divides",
    )
    parser.add_argument(
        "--split", default=None, metavar="S", help="with --hf-dataset, the split (default: train)"
    )
    parser.add_argument(
        "--column", default=None, metavar="C", help="with --hf-dataset, the text's column (default: text)"
    )
    parser.add_argument(
        "--config", default=None, metavar="NAME", help="with --hf-dataset, the data set's configuration"
    )


def open_documents(args: argparse.Namespace) -> tuple[Iterator[str], int | None]:
    """Open what the arguments name; returns the documents and their number where that is known beforehand.

    Raises:
        UserError: a file, data set, split, configuration or column is not there, or an option does not fit
            the source. Reading errors are raised as UserError while iterating.
    """
    if args.text:
        for flag, value in (("--split", args.split), ("--column", args.column), ("--config", args.config)):
            if value is not None:
                raise UserError(f"{flag} belongs to --hf-dataset; with --text leave it out.")
        return _open_text(args.text, args.document or "file")
    if args.document is not None:
        raise UserError("--document belongs to --text; with --hf-dataset every row is one document.")
    return _open_dataset(args.hf_dataset, args.split or "train", args.column or "text", args.config)


def _open_text(files: list[str], document: str) -> tuple[Iterator[str], int | None]:
    paths = [Path(file).expanduser() for file in files]
    for path in paths:
        _check_text_file(path, document)

    from datasets import load_dataset

    # glob.escape: a file name may hold characters that datasets would take for a pattern
    names = [glob.escape(str(path)) for path in paths]
    rows = load_dataset(
        "text", data_files=names, split="train", streaming=True, sample_by=_SAMPLE_BY[document]
    )
    total = len(paths) if document == "file" else None
    return _texts(rows, "text", f"--text {' '.join(files[:3])}{' ...' if len(files) > 3 else ''}"), total


def _check_text_file(path: Path, document: str) -> None:
    if path.is_dir():
        raise UserError(f"--text {path}: it is a folder; name its files, for example {path}/*.txt.")
    if not path.exists():
        raise UserError(f"--text {path}: there is no such file.")
    kind = path.with_suffix("").suffix if path.suffix in _COMPRESSED else path.suffix
    if kind in _BUILDER_OF_SUFFIX:
        raise UserError(
            f"--text {path}: a {kind} file is not plain text; use --hf-dataset {path} --column NAME."
        )
    size = path.stat().st_size
    if document == "file" and size > _MAX_FILE_DOCUMENT_BYTES:
        raise UserError(
            f"--text {path}: as one document its {size / 2**30:.1f} GiB would have to fit in memory; pass "
            "--document paragraph or --document line."
        )


def _open_dataset(name: str, split: str, column: str, config: str | None) -> tuple[Iterator[str], int | None]:
    where = f"--hf-dataset {name}"
    local = Path(name).expanduser()
    if not local.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise UserError(f"{where}: there is no such file or folder.")

    import datasets

    try:
        if local.is_dir() and ((local / "state.json").exists() or (local / "dataset_dict.json").exists()):
            rows = _load_saved(local, split)
        elif local.is_file():
            rows = _load_file(local, split)
        else:
            source = str(local) if local.exists() else name
            rows = datasets.load_dataset(source, name=config, split=split, streaming=True)
        columns = rows.column_names or list(next(iter(rows), {}))
    except UserError:
        raise
    except Exception as error:  # datasets raises many types here, from ValueError to ConnectionError
        raise UserError(
            f"{where}: cannot be opened ({_first_line(error)}); check --split and --config."
        ) from error
    if columns and column not in columns:
        raise UserError(
            f"{where}: there is no column {column!r}; pass --column with one of {', '.join(columns)}."
        )
    return _texts(rows, column, where), _number_of_rows(rows, split)


def _load_saved(folder: Path, split: str) -> Any:
    """A data set written by ``save_to_disk``: memory-mapped, so iterating it streams."""
    from datasets import DatasetDict, load_from_disk

    loaded = load_from_disk(str(folder))
    if not isinstance(loaded, DatasetDict):
        return loaded
    if split not in loaded:
        raise UserError(
            f"--hf-dataset {folder}: there is no split {split!r}; pass --split with one of "
            f"{', '.join(loaded)}."
        )
    return loaded[split]


def _load_file(file: Path, split: str) -> Any:
    from datasets import load_dataset

    kind = file.with_suffix("").suffix if file.suffix in _COMPRESSED else file.suffix
    if kind not in _BUILDER_OF_SUFFIX:
        raise UserError(
            f"--hf-dataset {file}: files of type {kind or 'no suffix'} are not read; use "
            f"{', '.join(_BUILDER_OF_SUFFIX)}, or --text {file} for plain text."
        )
    # a single file is its own only split, whatever the user calls it
    return load_dataset(
        _BUILDER_OF_SUFFIX[kind], data_files={split: glob.escape(str(file))}, split=split, streaming=True
    )


def _number_of_rows(rows: Any, split: str) -> int | None:
    if hasattr(rows, "__len__"):
        return len(rows)
    splits = getattr(rows.info, "splits", None)
    return (splits[split].num_examples or None) if splits and split in splits else None


def _texts(rows: Any, column: str, where: str) -> Iterator[str]:
    """The column as strings; a missing value counts as an empty document."""
    try:
        for row in rows:
            text = row[column]
            if text is not None and not isinstance(text, str):
                raise UserError(
                    f"{where}: column {column!r} holds {type(text).__name__}, not text; choose another "
                    "--column."
                )
            yield text or ""
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: not UTF-8 text ({error.reason}, byte {error.start}); convert it first."
        ) from error
    except Exception as error:  # whatever the reader of this format raises
        raise UserError(f"{where}: cannot be read ({_first_line(error)}).") from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
