import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer

from dynamo_snapshot.local.tiny_model import CONTEXT_LENGTH, write_tiny_model


def test_the_same_bytes_come_out_each_time(tmp_path: Path) -> None:
    first = write_tiny_model(tmp_path / "first")
    second = write_tiny_model(tmp_path / "second")
    names = sorted(path.name for path in first.iterdir())
    assert names == ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_every_token_the_mocker_emits_is_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(write_tiny_model(tmp_path) / "tokenizer.json"))
    assert tokenizer.get_vocab_size() > 2000
    for token_id in range(900, 1600):
        assert tokenizer.decode([token_id]).strip().isalpha()


def test_text_survives_the_way_through_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(write_tiny_model(tmp_path) / "tokenizer.json"))
    text = "Bananas are 7 € each, she said.\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert CONTEXT_LENGTH > 8000


def test_the_command_explains_itself_and_writes_no_folder_named_like_an_option(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dynamo_snapshot.local.tiny_model"]
    helped = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert helped.returncode == 0
    assert "folder" in helped.stdout
    assert not list(tmp_path.iterdir())
    bare = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert bare.returncode == 2
    assert "Traceback" not in bare.stderr
