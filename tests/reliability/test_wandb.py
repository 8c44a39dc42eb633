"""W&B's server fails in every way there is: the run goes on, is not held up, and its ledger lacks nothing."""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from processes import TINY, Run, record, without_timings

from ffnlab.config import WandbConfig
from ffnlab.training.ledger import read_points
from ffnlab.training.wandb_view import choose_mode

KEY = "local-" + "5ec7e7" * 7  # the shape of a real one
PATIENCE = 10.0  # seconds that W&B may cost, all together


class Clocked:
    """Adds up the time the run spends in what talks to W&B, and writes it down."""

    def __call__(self) -> None:
        from ffnlab.training import run, wandb_view

        spent = [0.0]

        def clock(name: str, owner: object) -> None:
            original = getattr(owner, name)

            def timed(*args: object, **kwargs: object) -> object:
                start = time.perf_counter()
                try:
                    return original(*args, **kwargs)
                finally:
                    spent[0] += time.perf_counter() - start
                    Path("spent").write_text(str(spent[0]))

            setattr(owner, name, timed)

        clock("open_wandb", run)
        clock("close_wandb", run)
        clock("log_metrics", wandb_view.StepAxes)


@contextlib.contextmanager
def server(status: int | None, body: bytes = b"{}", first: bytes | None = None) -> Iterator[str]:
    """A server that answers everything with ``status``, or accepts and never answers (None).

    ``first``: what it answers well before that.
    """
    over = threading.Event()
    kept = [first] if first else []

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            content = kept.pop() if kept else None
            if content is None and status is None:
                over.wait(120)
                return
            self.send_response(status if content is None and status else 200)
            content = content or body
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_HEAD = answer

        def log_message(self, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        over.set()
        http.shutdown()
        http.server_close()


@contextlib.contextmanager
def nobody() -> Iterator[str]:
    """An address at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@contextlib.contextmanager
def silence() -> Iterator[str]:
    """An address that swallows what is sent to it, as a firewall does (TEST-NET-1, RFC 5737)."""
    yield "http://192.0.2.1:8080"


WRONG_KEY = json.dumps({"errors": [{"message": "user is not logged in"}]}).encode()
Server = Callable[[], contextlib.AbstractContextManager[str]]
FAILURES: dict[str, tuple[Server, str]] = {
    "no network": (nobody, "does not answer"),
    "a firewall": (silence, "does not answer"),
    "a server that hangs": (lambda: server(None), "does not answer"),
    "answers 500": (lambda: server(500), "status 500"),
    "wrong key": (lambda: server(401, WRONG_KEY), "refuses the key"),
    "nobody is logged in": (lambda: server(200, b'{"data": {"viewer": null}}'), "refuses the key"),
    "nonsense": (lambda: server(200, b"<html>"), "is no W&B server"),
}


@pytest.mark.parametrize(("failure", "why"), FAILURES.items(), ids=FAILURES)
def test_a_server_that_cannot_be_used_is_found_out_and_said(
    monkeypatch: pytest.MonkeyPatch, failure: str, why: tuple[Server, str]
) -> None:
    start, says = why
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with start() as url:
        monkeypatch.setenv("WANDB_BASE_URL", url)
        mode, reason = choose_mode(WandbConfig())
    assert mode == "offline"
    assert says in reason
    assert KEY not in reason


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same run with W&B offline by choice: what its client costs when nothing is wrong."""
    folder = tmp_path_factory.mktemp("calm")
    run = Run(folder, [*TINY, "logger=wandb", "hydra.run.dir=run"], before=Clocked(), WANDB_MODE="offline")
    assert run.wait(180) == 0, run.said
    return folder


def points(folder: Path) -> list[dict[str, object]]:
    return [without_timings(point) for point in read_points(folder / "run")]


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["no network", "a server that hangs", "answers 500", "wrong key"])
def test_the_run_goes_on_and_the_ledger_lacks_nothing(tmp_path: Path, calm: Path, failure: str) -> None:
    with FAILURES[failure][0]() as url:
        env = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": url, "WANDB_MODE": ""}
        run = Run(tmp_path, [*TINY, "logger=wandb", "hydra.run.dir=run"], before=Clocked(), **env)
        assert run.wait(180) == 0, run.said
    assert "W&B is offline" in run.said
    assert "Traceback" not in run.said
    assert record(tmp_path / "run")["status"] == "finished"
    assert points(tmp_path) == points(calm)
    # the promise is a time: what the failure cost, from opening to closing
    stall = float((tmp_path / "spent").read_text()) - float((calm / "spent").read_text())
    print(f"{failure}: {stall:.1f} s more than offline by choice")
    assert stall < PATIENCE


@pytest.mark.slow
@pytest.mark.parametrize("then", [500, None], ids=["answers 500", "hangs"])
def test_a_server_that_fails_after_knowing_the_key(tmp_path: Path, calm: Path, then: int | None) -> None:
    """It answers the first question well and W&B's client finds the rest broken."""
    with server(then, first=b'{"data": {"viewer": {"id": "me"}}}') as url:
        env = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": url, "WANDB_MODE": ""}
        run = Run(tmp_path, [*TINY, "logger=wandb", "hydra.run.dir=run"], before=Clocked(), **env)
        assert run.wait(180) == 0, run.said
    assert "W&B" in run.said
    assert "Traceback" not in run.said
    assert points(tmp_path) == points(calm)
    stall = float((tmp_path / "spent").read_text()) - float((calm / "spent").read_text())
    print(f"fails later, {then}: {stall:.1f} s more than offline by choice")
    assert stall < PATIENCE


@pytest.mark.slow
def test_a_service_that_dies_on_the_way_stops_nothing(tmp_path: Path, calm: Path) -> None:
    run = Run(tmp_path, [*TINY, "logger=wandb", "hydra.run.dir=run"], before=ServiceDies(), WANDB_MODE="offline")
    assert run.wait(180) == 0, run.said
    assert "W&B" in run.said
    assert "Traceback" not in run.said
    assert points(tmp_path) == points(calm)


class ServiceDies:
    """Kills wandb's service process after the first validation."""

    def __call__(self) -> None:
        import signal

        from ffnlab.training.progress import ProgressLine

        original = ProgressLine.on_train_start

        def start(self_: ProgressLine, trainer: object, pl_module: object) -> None:
            for child in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
                if "wandb" in Path(f"/proc/{child}/cmdline").read_text():
                    os.kill(int(child), signal.SIGKILL)
                    Path("killed").touch()
            original(self_, trainer, pl_module)  # type: ignore[arg-type]

        ProgressLine.on_train_start = start  # type: ignore[method-assign,assignment]


def test_a_key_in_the_environment_reaches_no_file(tmp_path: Path) -> None:
    """Nor do other secrets that people keep there; W&B's own files are looked through as well."""
    secrets = {"WANDB_API_KEY": KEY, "HF_TOKEN": "hf_" + "s3cr3t" * 6, "AWS_SECRET_ACCESS_KEY": "aws+" + "s3cr3t" * 6}
    run = Run(tmp_path, [*TINY, "logger=wandb", "hydra.run.dir=run"], before=None, WANDB_MODE="offline", **secrets)
    assert run.wait(180) == 0, run.said
    for path in [*(tmp_path / "run").rglob("*"), tmp_path / "output.txt"]:
        if path.is_file():
            content = path.read_bytes()
            for name, secret in secrets.items():
                assert secret.encode() not in content, f"{name} in {path}"
