"""``prepare-data``: real files in, Megatron's own reader and tokenizer agree on what comes out."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_recover import prepare_data
from megatron_recover.errors import UserError
from prepare import END_OF_TEXT, documents, prepare, train_tokenizer

TEXTS = [
    "The quick brown fox\njumps over the lazy dog.\n",
    "A second document, with some Unicode: \u00e9\u00df\u6f22 \U0001f600.",
    "Third one.",
]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "bpe"
    train_tokenizer(documents()[:10], folder, 400)
    return folder


@pytest.fixture
def text_files(tmp_path: Path) -> list[Path]:
    files = [tmp_path / f"part-{number}[x].txt" for number in range(len(TEXTS))]  # brackets: not a glob
    for file, text in zip(files, TEXTS, strict=True):
        file.write_text(text, encoding="utf-8")
    return files


def run(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    prepare_data.add_arguments(parser)
    return prepare_data.main(parser.parse_args([str(argument) for argument in arguments]))


def stored(prefix: Path) -> list[list[int]]:
    """The documents as Megatron reads them."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    assert list(dataset.document_indices) == list(range(len(dataset) + 1))
    return [dataset[number].tolist() for number in range(len(dataset))]


def training_tokenizer(folder: Path) -> Any:
    """The tokenizer as ``--tokenizer-type HuggingFaceTokenizer`` builds it."""
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    arguments = SimpleNamespace(
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_model=str(folder),
        chat_template=None,
        vocab_file=None,
        merge_file=None,
        special_tokens=None,
        tokenizer_hf_no_use_fast=False,
        trust_remote_code=False,
        tokenizer_hf_no_include_special_tokens=False,
        metadata_path=None,
        pad_vocab_size=True,
        make_vocab_size_divisible_by=128,
        tensor_model_parallel_size=2,
        rank=0,
    )
    built = build_tokenizer(arguments)
    assert arguments.padded_vocab_size == 512
    return built


def test_text_files_give_what_the_training_side_tokenises(
    tmp_path: Path, text_files: list[Path], tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = tmp_path / "new" / "my.corpus"
    assert run("--text", *text_files, "--tokenizer", tokenizer, "--out", prefix) == 0

    training = training_tokenizer(tokenizer)
    assert training.vocab_size == 400
    assert training.detokenize([training.eod]) == END_OF_TEXT
    assert stored(prefix) == [[*training.tokenize(text), training.eod] for text in TEXTS]

    output = capsys.readouterr().out
    expected = f"--data-path {prefix} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {tokenizer}"
    assert expected in output
    assert "3 documents" in output
    assert sorted(file.name for file in prefix.parent.iterdir()) == ["my.corpus.bin", "my.corpus.idx"]


def test_paragraphs_and_lines_and_no_eod(tmp_path: Path, tokenizer: Path) -> None:
    file = tmp_path / "all.txt"
    file.write_text("one\ntwo\n\nthree\n\n\n \n\nfour\n", encoding="utf-8")
    training = training_tokenizer(tokenizer)
    for unit, texts in (
        ("paragraph", ["one\ntwo", "three", "four\n"]),
        ("line", ["one", "two", "three", "four"]),
    ):
        prefix = tmp_path / unit
        run("--text", file, "--document", unit, "--tokenizer", tokenizer, "--out", prefix, "--no-append-eod")
        assert [training.detokenize(ids).strip("\n") for ids in stored(prefix)] == [
            t.strip("\n") for t in texts
        ]


@pytest.mark.parametrize("kind", ["folder", "file", "parquet", "saved"])
def test_local_hugging_face_data_sets(tmp_path: Path, tokenizer: Path, kind: str) -> None:
    from datasets import Dataset

    rows = [{"body": text, "id": number} for number, text in enumerate([*TEXTS, "", None])]
    source = tmp_path / "source"
    source.mkdir()
    if kind == "parquet":
        Dataset.from_list(rows).to_parquet(source / "train.parquet")
    elif kind == "saved":
        Dataset.from_list(rows).save_to_disk(source)
    else:
        (source / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        (source / "validation.jsonl").write_text(json.dumps({"body": "other"}), encoding="utf-8")
    if kind == "file":
        source = source / "train.jsonl"

    prefix = tmp_path / "out"
    assert run("--hf-dataset", source, "--column", "body", "--tokenizer", tokenizer, "--out", prefix) == 0
    training = training_tokenizer(tokenizer)
    assert stored(prefix) == [[*training.tokenize(text), training.eod] for text in TEXTS]


def test_several_workers_keep_the_order(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"Document number {number}. " * (number % 7 + 1) for number in range(60)]
    monkeypatch.setattr(prepare_data, "_BATCH_DOCUMENTS", 7)
    for workers in (1, 2):
        summary = prepare_data.write_dataset(
            texts, str(tokenizer), tmp_path / f"by-{workers}", workers=workers, show_progress=False
        )
        assert summary.documents == 60
    assert stored(tmp_path / "by-1") == stored(tmp_path / "by-2")


def test_an_interrupted_run_leaves_nothing_and_harms_nothing(tmp_path: Path, tokenizer: Path) -> None:
    prefix = tmp_path / "out"
    prepare_data.write_dataset(TEXTS, str(tokenizer), prefix, show_progress=False)
    before = (tmp_path / "out.bin").read_bytes(), (tmp_path / "out.idx").read_bytes()

    def interrupted() -> Any:
        yield from TEXTS
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_data.write_dataset(interrupted(), str(tokenizer), prefix, overwrite=True, show_progress=False)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.bin", "out.idx"]
    assert before == ((tmp_path / "out.bin").read_bytes(), (tmp_path / "out.idx").read_bytes())


def test_overwrite_is_asked_for_and_drops_megatrons_index_cache(tmp_path: Path, tokenizer: Path) -> None:
    prefix = tmp_path / "out"
    prepare_data.write_dataset(TEXTS, str(tokenizer), prefix, show_progress=False)
    cached = prefix / "cache" / "GPTDataset_indices" / "old.npy"
    cached.parent.mkdir(parents=True)
    cached.touch()
    with pytest.raises(UserError, match="exists already; pass --overwrite"):
        prepare_data.write_dataset(TEXTS[:1], str(tokenizer), prefix, show_progress=False)
    prepare_data.write_dataset(TEXTS[:1], str(tokenizer), prefix, overwrite=True, show_progress=False)
    assert len(stored(prefix)) == 1
    assert not cached.exists()


def bad(tmp_path: Path, tokenizer: Path, *arguments: str | Path) -> str:
    """The message of a refused call that must not have written anything."""
    with pytest.raises(UserError) as refused:
        run(*arguments, "--tokenizer", tokenizer, "--out", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
    message = str(refused.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def test_bad_input_is_one_clear_sentence(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n\n")
    (tmp_path / "latin.txt").write_bytes("caf\u00e9 ol\u00e9".encode("latin-1"))
    (tmp_path / "rows.jsonl").write_text('{"body": "text", "n": 1}\n')
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text"\n')
    text, rows = ("--text", tmp_path / "rows.txt"), ("--hf-dataset", tmp_path / "rows.jsonl")

    assert "no such file" in bad(tmp_path, tokenizer, *text)
    assert "is a folder" in bad(tmp_path, tokenizer, "--text", tmp_path)
    assert "use --hf-dataset" in bad(tmp_path, tokenizer, "--text", tmp_path / "rows.jsonl")
    assert "holds no text" in bad(tmp_path, tokenizer, "--text", tmp_path / "empty.txt")
    assert "not UTF-8" in bad(tmp_path, tokenizer, "--text", tmp_path / "latin.txt")
    assert "pass --column with one of body, n" in bad(tmp_path, tokenizer, *rows)
    assert "holds int, not text" in bad(tmp_path, tokenizer, *rows, "--column", "n")
    assert "no such file or folder" in bad(tmp_path, tokenizer, "--hf-dataset", "./nowhere")
    assert "--hf-dataset some/name" in bad(tmp_path, tokenizer, "--hf-dataset", "some/name")
    assert "broken.jsonl" in bad(tmp_path, tokenizer, "--hf-dataset", tmp_path / "broken.jsonl")
    assert "--document belongs to --text" in bad(tmp_path, tokenizer, *rows, "--document", "line")
    assert "--split belongs to --hf-dataset" in bad(
        tmp_path, tokenizer, "--text", tmp_path / "empty.txt", "--split", "train"
    )
    assert "--workers 0" in bad(tmp_path, tokenizer, *rows, "--column", "body", "--workers", "0")


def test_unknown_split_is_named(tmp_path: Path, tokenizer: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.jsonl").write_text('{"text": "a"}\n')
    assert "train" in bad(tmp_path, tokenizer, "--hf-dataset", source, "--split", "test")


def test_tokenizer_that_cannot_be_used(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("text")
    assert "no such folder" in bad(tmp_path, tmp_path / "no-tokenizer", "--text", file)
    assert "while there is a network" in bad(tmp_path, Path("unknown-tokenizer-name"), "--text", file)

    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "without-eos"
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())).save_pretrained(str(folder))
    assert "pass --no-append-eod" in bad(tmp_path, folder, "--text", file)


def test_an_output_that_cannot_be_made_is_a_user_error(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--out .* cannot make its folder"):
        prepare_data.write_dataset(TEXTS, str(tokenizer), tmp_path / "file" / "out", show_progress=False)


def test_demo_data_is_made_once(tmp_path: Path) -> None:
    first = prepare(tmp_path / "demo", 300)
    assert first.made
    assert first.documents == len(documents())
    index = first.prefix.with_suffix(".idx")
    written = index.stat().st_mtime_ns
    again = prepare(tmp_path / "demo", 300)
    assert not again.made
    assert (again.documents, again.tokens) == (first.documents, first.tokens)
    assert index.stat().st_mtime_ns == written
    assert prepare(tmp_path / "demo", 301).made  # another recipe
    index.unlink()
    assert prepare(tmp_path / "demo", 301).made  # damaged


def test_runs_as_a_program_without_cuda_or_network(
    tmp_path: Path, text_files: list[Path], tokenizer: Path
) -> None:
    code = (
        "import argparse, sys\n"
        "from megatron_recover import prepare_data\n"
        "assert 'torch' not in sys.modules\n"
        "p = argparse.ArgumentParser(); prepare_data.add_arguments(p)\n"
        "sys.exit(prepare_data.main(p.parse_args()))\n"
    )
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            "--text",
            *text_files,
            "--tokenizer",
            tokenizer,
            "--out",
            tmp_path / "out",
        ],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""  # no warnings of others, no progress in a log
    assert len(stored(tmp_path / "out")) == len(TEXTS)
