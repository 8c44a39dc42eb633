"""The command line, in real processes: what is refused, how, and what is left behind."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ffnlab import cli
from ffnlab.arguments import as_names
from ffnlab.call import CONF, ROOT, override
from ffnlab.composition import compose_job, compose_sweep
from ffnlab.config import WandbConfig, compose
from ffnlab.data.config import HubData, TextData
from ffnlab.errors import UserError

Run = Callable[..., "subprocess.CompletedProcess[str]"]

CASES = [
    (["ffn=swiglue"], "ffn=swiglue is unknown (did you mean swiglu?); choose one of bilinear, geglu, gelu"),
    (["optim.lrr=1"], "unknown key optim.lrr (did you mean lr?)"),
    (["ffn=swish", "ffn.bta=2"], "unknown key ffn.bta (did you mean beta?)"),
    (["ffn=gelu", "ffn.beta=1"], "unknown key ffn.beta here; it comes with ffn=swish"),
    (["resume="], "resume= names no run directory"),
    (["+trainer.fast_dev_run=true"], "trainer.fast_dev_run is set by the run itself: use train.tokens"),
    (["trainer.num_nodes=0"], "trainer.num_nodes must be a positive whole number, not 0"),
    (["sed=1"], "unknown key sed (did you mean seed?)"),
    (["ffn=relu,gelu"], "ffn=relu,gelu asks for several runs: add -m"),
    (["seed=0,1"], "seed=0,1 asks for several runs: add -m"),
    (["model.n_heads=5"], "model.n_heads=5 does not divide model.d_model=24"),
    (["model.n_heads=24", "model.positions=rope"], "d_model / n_heads must be even, not 1"),
    (["budget.multiple_of=256"], "budget=params cannot be met at d_model=24"),
    (["budget=none"], "budget.d_ff must be given: add budget.d_ff=..."),
    (["train.tokens=10"], "train.tokens=10 is less than one batch"),
    (["model.d_model=-24"], "model.d_model must be greater than 0, not -24"),
    (["model.n_layers=0"], "model.n_layers must be greater than 0, not 0"),
    (["optim.lr=-1"], "optim.lr must be greater than or equal to 0, not -1"),
    (["optim.lr=fast"], "optim.lr must be a valid number, not 'fast'"),
    (["optim.lr=.inf"], "optim.lr"),
    (["train.batch_size=0"], "train.batch_size must be greater than 0, not 0"),
    (["ffn.dropout_hidden=1.0"], "dropout_hidden must lie in [0, 1), not 1.0"),
    (["ffn.dropout_output=-0.5"], "dropout_output must lie in [0, 1), not -0.5"),
    (["model.dropout_attention=1"], "model.dropout_attention must be less than 1, not 1"),
    (["ffn.bias=3"], "ffn.bias must be of type bool, not 3"),
    (["ffn.down_init=zeros"], "ffn.down_init must be"),
    (["seed=-1"], "seed must be greater than or equal to 0, not -1"),
    (["model.norm_placement=middle"], "model.norm_placement must be 'pre' or 'post', not 'middle'"),
    (["trainer.devices=0"], "trainer.devices must be positive"),
    (["trainer.accelerator=gpuu"], "trainer"),
    (["trainer.precision=8"], "trainer"),
    (["study=a b"], "study"),
    (["data.paths=nowhere.txt"], "nowhere.txt"),
    (["data.paths=*.nothing"], "no file matches"),
    (["data=tinystories", "~data.paths"], "TinyStories"),
    (["resume=nowhere"], "resume=nowhere: that is no run directory"),
    (["a b c"], "'a b c' is no key=value: quote a value with spaces"),
    (["=3"], "=3 names no key"),
    (["--ffn", "swiglu"], "--ffn is no option: keys have no dashes, write ffn=swiglu"),
    (["--seed=3"], "write seed=3"),
    (["-m", "--lr", "3"], "write lr=3"),
    (["--config-name", "nope"], "--config-name is not used here"),
    (["--config-path", "x"], "--config-path is not used here"),
    (["--config-dir", "nowhere"], "--config-dir nowhere: there is no such folder"),
    (["--cfg", "jobs"], "invalid choice: 'jobs'"),
    (["--cfg", "job", "-m", "seed=0,1"], "-m and --cfg do not go together"),
    (["--cfg", "job", "ffn=swiglue"], "did you mean swiglu?"),
    (["swiglu"], "write ffn=swiglu"),
    (["ffn", "=", "gelu"], "write ffn=CHOICE, without spaces around ="),
    (["ffn=relu.yaml"], "names a file: write ffn=relu"),
    (["ffn=3"], "ffn=3 is unknown; choose one of"),
    (["-sc", "install=nosh"], "--shell-completion takes install=bash (zsh, fish)"),
    (["ffn=SwiGLU"], "did you mean swiglu?"),
    (["seed=0..3"], "write -m seed=0,1,2,3"),
    (["-m", "seed=0..300"], "write seed='range(0,301)'"),
    (["seed=[0,1]"], "write -m seed=0,1"),
    (["seed=1", "seed=2"], "seed is given twice: leave one out, or for several runs write -m seed=1,2"),
    (["seed=fast"], "error: seed must be a whole number, not 'fast'\n"),
    (["+seed=1"], "seed is there already: write seed=..., without +"),
    (["~seed"], "~seed: seed cannot be taken away, other keys follow it; write seed=..."),
    (["lr=1e-3"], "unknown key lr; write optim.lr"),
    (["modle.d_model=3"], "there is no section 'modle' (did you mean model?)"),
    (["trainer.max_epoch=3"], "take a +"),
    (["train.tokens=1.5M"], "must be a whole number, such as 1_500_000 or 1.5e6, not '1.5M'"),
    (["train.tokens=1.5"], "must be a whole number, not 1.5"),
    (["model.d_model=1000000008", "model.n_heads=1"], "GiB of memory"),
    (["hydra.run.dir="], "hydra.run.dir= names no directory"),
    (["study=a/b"], "study must be a name of letters"),
    (["trainer.strategy=ddp_notebook"], "trainer.strategy=ddp_notebook is not for a run that a command starts"),
    (["trainer.strategy=foo"], "lightning.Trainer refuses trainer.*"),
    (["trainer.num_nodes=2"], "needs the other nodes to be started too"),
    (["-m", "experiment=glu_varaints"], "did you mean glu_variants?"),
    (["-m", "ffn=relu,gelx", "seed=0,1"], "ffn=gelx is unknown (did you mean gelu?)"),
]


@pytest.mark.parametrize(("overrides", "words"), CASES, ids=[" ".join(case[0]) for case in CASES])
def test_bad_input_is_refused_shortly_and_leaves_nothing(
    overrides: list[str], words: str, tiny: list[str], tmp_path: Path, run_script: Run
) -> None:
    groups = {o.lstrip("+~").split("=")[0] for o in overrides}
    kept = [o for o in tiny if o.split("=")[0] not in groups]
    if "~data.paths" in overrides:  # another corpus: the text file's keys do not belong to it
        overrides = [o for o in overrides if o != "~data.paths"]
        kept = [o for o in kept if not o.startswith("data.paths")]
    if overrides[0].startswith("resume"):
        kept = []
    done = run_script("train.py", *kept, *overrides)
    assert done.returncode == 1, done.stdout + done.stderr
    message = done.stderr
    assert words in message
    assert message.startswith("error: ")
    assert "Traceback" not in message + done.stdout
    assert len(message) < 700
    assert len(message.splitlines()) <= 3
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"short", "too short"),
        (b"caf\xe9 " * 1000, "UTF-8"),
    ],
)
def test_bad_text_files(content: bytes, words: str, tiny: list[str], tmp_path: Path, run_script: Run) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes(content)
    done = run_script("train.py", *[o for o in tiny if "paths" not in o], f"data.paths={bad}")
    assert done.returncode == 1
    assert words in done.stderr
    assert "bad.txt" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "outputs").glob("*"))


def test_a_vocabulary_larger_than_the_text_supports(tiny: list[str], run_script: Run) -> None:
    overrides = [o for o in tiny if "tokenizer" not in o]
    done = run_script("train.py", *overrides, "data.tokenizer.vocab_size=60000")
    assert done.returncode == 1
    assert "60000" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_ends_with_status_0_and_says_where_things_are(tiny: list[str], tmp_path: Path, run_script: Run) -> None:
    done = run_script("train.py", "ffn=gelu", "seed=0", *tiny)
    assert done.returncode == 0, done.stderr
    [run] = (tmp_path / "outputs").iterdir()
    assert "-gelu-s0-" in run.name
    for words in ("d_ff", "mismatch", "+0.00%", "FLOPs", "val/loss", f"outputs/{run.name}", "scripts/sample.py"):
        assert words in done.stdout
    assert not any(mark in done.stdout + done.stderr for mark in ("\x1b", "Traceback", "Warning", "💡"))
    sample = run_script("scripts/sample.py", f"outputs/{run.name}", "--prompt", "the quick", "--tokens", "12")
    assert sample.returncode == 0, sample.stderr
    assert sample.stdout.startswith("the quick")


def test_two_runs_at_once_have_directories_of_their_own(tiny: list[str], tmp_path: Path, run_script: Run) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda seed: run_script("train.py", f"seed={seed}", *tiny), (0, 0)))
    assert [done.returncode for done in both] == [0, 0]
    assert len(list((tmp_path / "outputs").iterdir())) == 2


def test_a_directory_is_never_used_twice(tiny: list[str], tmp_path: Path, run_script: Run) -> None:
    assert run_script("train.py", *tiny, "hydra.run.dir=outputs/mine").returncode == 0
    before = (tmp_path / "outputs" / "mine" / "result.json").read_bytes()
    again = run_script("train.py", *tiny, "hydra.run.dir=outputs/mine")
    assert again.returncode == 1
    assert "holds a run already; go on with it by resume=outputs/mine" in again.stderr
    assert (tmp_path / "outputs" / "mine" / "result.json").read_bytes() == before


def test_wandb_without_a_key_and_without_a_terminal(tiny: list[str], run_script: Run) -> None:
    overrides = [o for o in tiny if not o.startswith("logger")]
    done = run_script("train.py", *overrides, WANDB_MODE="online", HOME="/nonexistent", NETRC="/nonexistent")
    assert done.returncode == 0, done.stderr
    assert "W&B is offline: no API key is configured" in done.stdout
    assert "wandb sync outputs/" in done.stdout


def test_help_fits_a_screen_and_hides_schemas(run_script: Run) -> None:
    done = run_script("train.py", "--help")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 160
    assert "swiglu" in done.stdout
    assert "schema" not in done.stdout
    examples = [line.split("  ")[0] for line in lines if line.startswith("python train.py ")]
    tried = 0
    for example in examples:  # every example names real groups, choices and keys
        words = example.split()[2:]
        if not any(word.startswith("--") for word in words):
            compose([word.split(",")[0] for word in words if word != "-m"])
            tried += 1
    assert tried >= 4


@pytest.mark.parametrize("command", [["train.py", "--help"], ["train.py", "--cfg", "job"], ["scripts/status.py", "s"]])
def test_a_reader_that_has_read_enough_ends_it_in_silence(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "study.json").write_text('{"cells": {}}')
    reading, writing = os.pipe()
    os.close(reading)  # before anything is written: `| head` may be that quick
    script = Path(__file__).resolve().parents[1] / command[0]
    done = subprocess.run(
        [sys.executable, str(script), *command[1:]], cwd=tmp_path, stdout=writing, stderr=subprocess.PIPE, timeout=120
    )
    os.close(writing)
    assert done.stderr == b""


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["experiment=null"], "experiment=null names no choice"),
        (["model=true"], "model=true names no choice"),
        (["hydra/launcher=null"], "hydra/launcher=null names no choice"),
        (["~ffn"], "~ffn: ffn cannot be taken away"),
        (["~baseline"], "~baseline takes nothing away: baseline is null already"),
        (["~train.val_every"], "train.val_every is null already"),
        (["~train.tokenss"], "there is no such key (did you mean tokens?)"),
        (["seed.x=3"], "seed has no keys"),
        (["data.pathss=3"], "unknown key data.pathss (did you mean paths, which comes with data=text?)"),
        (["data.repoo=3"], "(did you mean repo, which comes with data=tinystories or data=wikitext103?)"),
        (["data=copy", "data.lenth=3"], "unknown key data.lenth (did you mean length?)"),
        (["train.tokens=1,000"], "asks for several runs: add -m; for a number write 1_000"),
        (["train.tokens=1,000,000"], "for a number write 1_000_000"),
        (["experiment=copy_task", "data=shakespeare"], "the copy task brings its own data"),
        (["experiment=copy_task", "data=text", "data.paths=a.txt"], "the copy task brings its own data"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_answered_with_what_to_type_instead(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        compose(overrides)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["2026", "1", "0", "1e5", "1_000", "007", "1.50", "inf"])
def test_a_name_may_look_like_a_number(name: str) -> None:
    assert compose([f"study={name}", f"logger.project={name}"]).study == name
    data = compose(["data=text", f"data.paths=[{name},b.txt]"]).data
    assert isinstance(data, TextData)
    assert data.paths == [name, "b.txt"]
    revised = compose(["data=tinystories", f"data.revision={name}", f"data.name='{name}'"]).data
    assert isinstance(revised, HubData)
    assert (revised.revision, revised.name) == (name, name)
    with pytest.raises(UserError, match=f"ffn={name} is unknown"):
        compose([f"ffn={name}"])


def test_an_experiment_file_may_name_a_study_by_a_number(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "2026.yaml").write_text("# @package _global_\nstudy: 2026\nlogger: {project: 7}\n")
    cfg = compose(["experiment=2026"], tmp_path)
    assert isinstance(cfg.logger, WandbConfig)
    assert (cfg.study, cfg.logger.project) == ("2026", "7")


OWN_BLOCK = """
from __future__ import annotations
from functools import wraps
from typing import TYPE_CHECKING
from torch import nn
if TYPE_CHECKING:
    from somewhere import Size

def noted(init):
    @wraps(init)
    def both(*args, **options): init(*args, **options)
    return both

class Named(nn.Module):
    def __init__(this, d_model, d_ff, /, width: int = 2): super().__init__()

class Wrapped(nn.Module):
    @noted
    def __init__(module, d_model, d_ff, width: int = 2): super().__init__()

class Annotated(nn.Module):
    def __init__(self, d_model: Size, d_ff: Size, width: int = 2): super().__init__()
"""


@pytest.mark.parametrize("block", ["Named", "Wrapped", "Annotated"])
def test_a_block_of_ones_own_may_be_written_in_any_style(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_styles.py").write_text(OWN_BLOCK)
    (tmp_path / "ffn").mkdir()
    (tmp_path / "ffn" / "mine.yaml").write_text(f"_target_: own_styles.{block}\nwidth: 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_styles", raising=False)
    assert compose(["ffn=mine"], tmp_path).ffn.options == {"width": 3}
    with pytest.raises(UserError, match=rf"{block} has no option 'wdith' \(options: width\)"):
        compose(["ffn=mine", "+ffn.wdith=3"], tmp_path)


def test_a_number_stays_one_where_it_is_asked_for() -> None:
    words = [
        "seed=3",
        "optim.lr=1e-3",
        "ffn=swish",
        "ffn.beta=2",
        "data=copy",
        "data.length=4",
        "study=a",
        "~optim.eps",
    ]
    assert as_names(words) == words


def test_runs_and_studies_called_by_numbers(tiny: list[str], tmp_path: Path, run_script: Run) -> None:
    for words in (["hydra.run.dir=1e5"], ["resume=1e5"], ["study=2026"], ["-m", "study=2026", "hydra/launcher=basic"]):
        done = run_script("train.py", *([] if "resume=1e5" in words else tiny), *words)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "1e5" / "result.json").exists()
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == ["2026"]


def test_a_run_directory_whose_name_hydra_would_fill_in(tiny: list[str], tmp_path: Path, run_script: Run) -> None:
    assert run_script("train.py", *tiny, override("hydra.run.dir", "of-${x}")).returncode == 0
    assert (tmp_path / "of-${x}" / "result.json").exists()
    again = run_script("train.py", override("resume", "of-${x}"))
    assert "of-${x} is finished already" in again.stdout


FOLDERS = [
    "a b",
    "it's",
    'say "x"',
    "a,b",
    "$HOME",
    "${x}",
    "{a}",
    "k=v",
    "back\\slash",
    "\\",
    "Öl ü",
    "[x]",
    "'\\${x}\"",
]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_groups_may_have_any_name(name: str, tmp_path: Path) -> None:
    own = tmp_path / name / "groups" / "ffn"
    own.mkdir(parents=True)
    shutil.copy(CONF / "ffn" / "gelu.yaml", own / "mine.yaml")
    assert compose(["ffn=mine"], own.parent).ffn.name == "mine"
    assert compose_sweep(["ffn=mine,gelu"], str(own.parent)).jobs == [["ffn=mine"], ["ffn=gelu"]]


def test_the_shell_completes_keys_and_choices(run_script: Run) -> None:
    installed = run_script("train.py", "-sc", "install=bash")
    assert (installed.returncode, installed.stderr) == (0, "")
    python = shlex.quote(str(Path(sys.executable).parent))
    ask = """COMP_WORDS=($COMP_LINE) COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMP_POINT=${#COMP_LINE}
    hydra_bash_completion; echo "${COMPREPLY[@]}" """
    lines = {"ffn=sw": "ffn=swiglu ffn=swish", "ffn=swish ffn.be": "ffn.beta=", "-m data=te": "data=text"}
    script = [f"PATH={python}:$PATH; cd {shlex.quote(str(ROOT))}", installed.stdout]
    script += [f"COMP_LINE='python train.py {line}'; {ask}" for line in lines]
    done = subprocess.run(["bash", "-c", "\n".join(script)], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == list(lines.values())
    assert done.stderr == ""


@pytest.mark.parametrize("stderr_too", [False, True])
def test_a_reader_that_leaves_while_there_is_work_is_no_crash(stderr_too: bool) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    body = "from ffnlab import cli; cli._main = lambda: print('plan'); cli.sys.exit(cli.main())"
    errors = writing if stderr_too else subprocess.PIPE
    done = subprocess.run([sys.executable, "-u", "-c", body], stdout=writing, stderr=errors, timeout=120, check=False)
    os.close(writing)
    assert done.returncode == 128 + signal.SIGPIPE
    assert stderr_too or done.stderr == b"stopped: what reads the output has ended; the same command goes on\n"


def test_a_broken_pipe_of_anything_else_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise BrokenPipeError("a worker's")

    monkeypatch.setattr(cli, "_main", broken)
    with pytest.raises(BrokenPipeError, match="a worker's"):
        cli.main()


def test_whole_floats_are_whole_numbers() -> None:
    cfg = compose(["train.tokens=1e5", "seed=2.0", "data=copy"])
    assert (cfg.train.tokens, cfg.seed) == (100_000, 2)
    assert isinstance(cfg.train.tokens, int)


@pytest.mark.parametrize(("file", "content"), [("result.json", "{}"), ("run.json", '{"status": "x", "hashes": null}')])
def test_a_damaged_run_does_not_go_on(
    file: str, content: str, tiny: list[str], tmp_path: Path, run_script: Run
) -> None:
    assert run_script("train.py", *tiny, "hydra.run.dir=outputs/mine").returncode == 0
    (tmp_path / "outputs" / "mine" / file).write_text(content)
    again = run_script("train.py", "resume=outputs/mine")
    assert again.returncode == 1
    assert again.stderr.startswith(f"error: outputs/mine/{file}: ")
    assert len(again.stderr.splitlines()) == 1


def test_sample_refuses_what_is_no_run(tmp_path: Path, run_script: Run) -> None:
    done = run_script("scripts/sample.py", "nowhere")
    assert done.returncode == 1
    assert "nowhere is no run directory" in done.stderr


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a block of one's own, in which the command is typed."""
    (tmp_path / "conf" / "ffn").mkdir(parents=True)
    (tmp_path / "conf" / "ffn" / "mine.yaml").write_text("_target_: ffnlab.ffn.DenseFFN\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "conf"


def test_a_forgotten_config_dir_is_named(own: Path) -> None:
    with pytest.raises(UserError, match=r"ffn=mine is unknown, but conf/ffn/mine.yaml is here: add --config-dir conf"):
        compose_job(["ffn=mine"])
    assert compose_job(["ffn=mine"], str(own)).choices["ffn"] == "mine"
    with pytest.raises(UserError, match=r"ffn=mina is unknown \(did you mean mine"):
        compose_job(["ffn=mina"], str(own))


def test_a_choice_that_hides_behind_one_of_ours_is_refused(own: Path) -> None:
    theirs = own / "ffn" / "swiglu.yaml"
    theirs.write_text("_target_: mine.SwiGLU\n")
    with pytest.raises(UserError, match=rf"ffn=swiglu is one of ffnlab's own, which would be taken: rename {theirs}"):
        compose_job(["ffn=swiglu"], str(own))
    compose_job(["ffn=mine"], str(own))  # nobody is in doubt about this one
    theirs.write_bytes((CONF / "ffn" / "swiglu.yaml").read_bytes())
    compose_job(["ffn=swiglu"], str(own))  # nor about a copy


def test_an_option_that_a_block_of_ones_own_does_not_list(own: Path) -> None:
    with pytest.raises(UserError, match=rf"has the options that its YAML lists: add bias to {own}/ffn/mine.yaml"):
        compose_job(["ffn=mine", "ffn.bias=true"], str(own))
