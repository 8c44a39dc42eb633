"""Built once, whole or not at all, checked when opened; real processes, real kills."""

import logging
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ffnlab
from ffnlab.data import TextData, TextTokens, TokenizerConfig, prepare
from ffnlab.errors import UserError

ROOT = Path(ffnlab.__file__).parents[1]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "a text.txt"
    path.write_text("".join(f"Line {n} of a text, {n * 7919 % 1000}.\n" for n in range(4_000)))
    return path


def load(text: Path) -> TextTokens:
    cfg = TextData(paths=[str(text)], tokenizer=TokenizerConfig(vocab_size=300))
    return prepare(cfg, 32, text.parent / "cache")


def entry(text: Path) -> Path:
    (folder,) = (path for path in (text.parent / "cache").iterdir() if path.is_dir())
    return folder


def start(text: Path, before: str = "") -> subprocess.Popen[str]:
    """Another process that prepares ``text``, after the line ``before``."""
    code = f"""
import logging, sys, time
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
import ffnlab.data.preparation as preparation
from ffnlab.data import TextData, TokenizerConfig
from ffnlab.errors import UserError
{before}
cfg = TextData(paths=[sys.argv[1]], tokenizer=TokenizerConfig(vocab_size=300))
try:
    print("hash", preparation.prepare(cfg, 32, preparation.Path(sys.argv[2])).hash, flush=True)
except UserError as error:
    print("error:", error)
"""
    command = [sys.executable, "-c", code, str(text), str(text.parent / "cache")]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


STOP_INSIDE = """
def stuck(*_):
    print("inside", flush=True)
    time.sleep(120)
preparation.make_tokenizer = stuck
"""


@pytest.mark.slow
def test_processes_that_start_together_build_once(text: Path) -> None:
    # a build that takes a second, and a start at the same moment: without a lock all three would build
    slow = """
make = preparation.make_tokenizer
preparation.make_tokenizer = lambda *a: (time.sleep(1), make(*a))[1]
from pathlib import Path
gate = Path(sys.argv[1] + ".go")
print("ready", flush=True)
while not gate.exists():
    time.sleep(0.01)
"""
    processes = [start(text, slow) for _ in range(3)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    Path(f"{text}.go").touch()
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert sum("preparing" in out.replace("is preparing", "") for out in said) == 1, said
    assert sum("waiting for it" in out for out in said) == 2, said
    assert len({out.split("hash ")[1] for out in said}) == 1


def test_a_killed_builder_blocks_nobody_and_leaves_nothing(text: Path) -> None:
    process = start(text, STOP_INSIDE)
    assert process.stdout is not None
    while "inside" not in process.stdout.readline():
        assert process.poll() is None
    cache = text.parent / "cache"
    assert list(cache.glob("*.tmp-*")), "it was killed in the middle of building"
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=10) == -signal.SIGKILL
    process.stdout.close()
    assert len(load(text).train) > 1000
    assert not list(cache.glob("*.tmp-*"))


def test_another_process_builds_the_same(text: Path) -> None:
    said = start(text).communicate(timeout=60)[0]
    (text.parent / "cache").rename(text.parent / "first cache")
    assert f"hash {load(text).hash}\n" in said


def test_the_second_call_builds_nothing(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(text)
    monkeypatch.setattr("ffnlab.data.preparation.make_tokenizer", lambda *_: pytest.fail("built again"))
    second = load(text)
    assert second.hash == first.hash
    assert isinstance(second.train, np.memmap)
    assert not second.train.flags.writeable
    assert second.tokenizer.decode(second.val[1:30].tolist()) == first.tokenizer.decode(first.val[1:30].tolist())


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
@pytest.mark.parametrize("name", ["train.bin", "val.bin", "tokenizer.json", "meta.json"])
def test_a_damaged_file_is_noticed_and_built_again(
    text: Path, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = load(text)
    train = np.array(before.train)
    path = entry(text) / name
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "truncate":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.unlink()
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="ffnlab.data"):
        after = load(text)
    assert [record for record in caplog.records if "damaged" in record.message]
    assert len(caplog.records) == 1
    assert after.hash == before.hash
    assert np.array_equal(after.train, train)
    caplog.clear()
    load(text)
    assert not caplog.records


def test_a_failed_build_leaves_nothing_and_the_next_works(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("ffnlab.data.preparation._write_tokens", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            load(text)
    assert not [path for path in (text.parent / "cache").iterdir() if path.is_dir()]
    assert len(load(text).train) > 1000


def test_a_cache_that_cannot_be_written_is_said(text: Path) -> None:
    (text.parent / "cache").write_text("a file where the folder should be")
    with pytest.raises(UserError, match=r"cannot write token files in .*Set data.cache_dir or FFNLAB_CACHE"):
        load(text)


@pytest.mark.slow
def test_a_full_disk_is_one_clear_line_and_leaves_no_files(text: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"
    process = start(text, limit)
    said = process.communicate(timeout=60)[0]
    (line,) = (line for line in said.splitlines() if line.startswith("error:"))
    assert "cannot write token files in" in line
    assert process.returncode == 0
    assert not [path for path in (text.parent / "cache").iterdir() if path.is_dir()]
