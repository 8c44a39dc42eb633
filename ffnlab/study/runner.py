"""Run a study: compose, check, try, launch on one of Hydra's launchers, and say how it went.

The same command goes on where the last one stopped: what a cell is called follows from its configuration, and what it
still needs from its directory.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.plugins import Plugins
from omegaconf import open_dict, read_write

from ffnlab.call import call, override
from ffnlab.composition import Sweep
from ffnlab.config import StudyConfig, to_plain
from ffnlab.errors import UserError
from ffnlab.ffn import locate
from ffnlab.run_dir import check_run_dir
from ffnlab.signals import SIGNALS, Interrupted
from ffnlab.study import manifest, resources, worker
from ffnlab.study.cells import Cell, State, is_running, look, put_aside
from ffnlab.study.preflight import Datasets, preflight
from ffnlab.study.rates_stage import fresh_jobs
from ffnlab.study.sweep import make_cells, study_name, take_apart
from ffnlab.training.environment import code_fingerprint, command


@dataclass
class Plan:
    """What is to be done with the cells of a command."""

    cells: list[Cell]
    states: dict[str, State]
    to_run: list[Cell]
    afresh: list[str]  # cells whose directory is put aside first
    kept_stale: list[str]


def run_study(overrides: list[str], config_dir: str | None = None, several: bool = True) -> int:
    """Run the study that a command asks for, or go on with it; returns the exit status.

    0: every cell is finished. 1: some failed or diverged, and are listed. 130, 143: stopped; the same command goes on.

    Raises:
        UserError: before anything was started: a cell that cannot run, stale cells, a study declared otherwise.
    """
    sweep, settings = take_apart(overrides, config_dir, several)
    name = study_name(sweep.master, sweep.typed)
    with read_write(sweep.master), open_dict(sweep.master):
        sweep.master.study = name  # Hydra's folders follow it
    study_dir = Path(str(sweep.master.hydra.sweep.dir))
    leader = worker.Leader.here()
    cells = make_cells(sweep.jobs, name, config_dir)
    status = _run_cells(sweep, settings, study_dir, cells, leader, several)
    if settings.fresh_seeds and status in (0, 1):
        later = make_cells(fresh_jobs(study_dir, cells, settings.fresh_seeds), name, config_dir)
        if later:
            worker.say(f"\n{len(later)} cells on fresh seeds, each block at the rate it did best with")
            settings.fresh_seeds = None
            status = max(status, _run_cells(sweep, settings, study_dir, later, leader, several))
            cells += later
    if several and any(entry.get("status") == "finished" for entry in manifest.entries(study_dir).values()):
        worker.say(f"report    {call('scripts/report.py', study_dir)}")
    return status


def _run_cells(
    sweep: Sweep, settings: StudyConfig, study_dir: Path, cells: list[Cell], leader: worker.Leader, several: bool
) -> int:
    for cell in cells:
        resources.check_one_device(cell.cfg)
    check_run_dir(study_dir)
    worker.forget_stop(study_dir, leader)  # of a process that was killed, and had this one's number
    manifest.check_declared(study_dir, settings, cells)
    plan = _plan(study_dir, cells, settings)
    _say_plan(study_dir, plan)
    if plan.to_run:
        started = time.perf_counter()
        here = not several or resources.dies_with_command(sweep.master.hydra.launcher)
        here = here or not resources.in_background(sweep.master.hydra.launcher)
        count = preflight(plan.to_run, on_cpu=not here)
        tried = f"{count} configuration{'s' if count > 1 else ''} tried for two steps"
        worker.say(f"{len(plan.to_run)} to run; {tried}, in {time.perf_counter() - started:.0f} s")
        if several:
            worker.say(f"progress  {call('scripts/status.py', study_dir)}")
    study_dir.mkdir(parents=True, exist_ok=True)
    for name in plan.afresh:
        put_aside(study_dir, name, plan.states[name])
    pending = [cell.name for cell in plan.to_run if not is_running(study_dir, cell.name)]
    manifest.declare(study_dir, settings, command(), cells, pending, plan.kept_stale)
    for cell in cells:
        state = plan.states[cell.name]
        if state.status == "finished" and cell not in plan.to_run:
            worker.record_finished(study_dir, cell.name, state.record, state.result)
    stopped = _launch(sweep, study_dir, cells, plan.to_run, leader, several) if plan.to_run else 0
    return _summary(study_dir, cells, stopped)


# -- planning -------------------------------------------------------------------------------------------------------


def _plan(study_dir: Path, cells: list[Cell], settings: StudyConfig) -> Plan:
    """Look at every cell.

    Raises:
        UserError: stale cells, and no word on what to do with them.
    """
    entries = manifest.entries(study_dir)
    states = {cell.name: look(study_dir / cell.name, entries.get(cell.name, {})) for cell in cells}
    datasets = Datasets()
    plan = Plan(cells, states, [], [], [])
    stale: dict[str, str] = {}
    for cell in cells:
        state = states[cell.name]
        if state.status != "finished" and is_running(study_dir, cell.name):
            plan.to_run.append(cell)  # waits for that process, and has its result then
            continue
        changed = _what_changed(cell, state, datasets) if state.record else ""
        anew = bool(state.damaged)
        if state.status in ("failed", "diverged"):
            if not settings.retry:
                continue
            anew |= (
                bool(changed) or state.status == "diverged"
            )  # a divergence would only come again from its checkpoint
        elif changed:
            done = "finished" if state.status == "finished" else "half done"
            stale[cell.name] = f"{done} with {changed}"
            anew |= settings.stale == "rerun" or (state.status == "unfinished" and "data" in changed)
            if not anew:
                plan.kept_stale.append(cell.name)
        if anew:
            plan.afresh.append(cell.name)
        if anew or state.status != "finished":
            plan.to_run.append(cell)
    if stale and settings.stale is None:
        raise UserError(
            "\n".join(f"{name} is {why}" for name, why in stale.items())
            + f"\n{len(stale)} of {len(cells)} cells are stale: stale=rerun runs them again, stale=keep keeps them"
        )
    # What another process runs comes last: by then it may be done.
    plan.to_run.sort(key=lambda cell: is_running(study_dir, cell.name))
    return plan


def _what_changed(cell: Cell, state: State, datasets: Datasets) -> str:
    if state.data and state.data != datasets.hash(cell.cfg):
        return "other data"
    if state.code and state.code != code_fingerprint(locate(cell.cfg.ffn.target)):
        return "other code"
    return ""


def _say_plan(study_dir: Path, plan: Plan) -> None:
    worker.say(f"study {study_dir.name}: {len(plan.cells)} cells in {study_dir}")
    to_run = {cell.name for cell in plan.to_run}
    for cell in plan.cells:
        state = plan.states[cell.name]
        if cell.name in plan.kept_stale:
            worker.say(f"{cell.name}: stale, kept")
        if state.damaged and cell.name in to_run:
            worker.say(f"{cell.name}: begins afresh: {state.damaged}")
        if state.status == "finished" and cell.name not in to_run:
            worker.say(f"{cell.name}: finished before, val/loss {state.result['val/loss']:.4f}")
        elif state.status in ("failed", "diverged") and cell.name not in to_run:
            worker.say(f"{cell.name}: {state.status} before: {state.error} (retry=true runs it again)")


# -- launching ------------------------------------------------------------------------------------------------------


def _launch(
    sweep: Sweep, study_dir: Path, cells: list[Cell], to_run: list[Cell], leader: worker.Leader, several: bool
) -> int:
    """Hand the cells to the launcher; returns the number of a signal that stopped them, or 0."""
    if not several:
        launcher_cfg: Any = {"_target_": "hydra._internal.core_plugins.basic_launcher.BasicLauncher"}
        with open_dict(sweep.master.hydra):
            sweep.master.hydra.launcher = launcher_cfg
    launcher_cfg = sweep.master.hydra.launcher
    background = resources.in_background(launcher_cfg)
    if background:
        resources.lend_path([str(Path(__file__).resolve().parents[2]), str(Path.cwd())])
    task = worker.CellTask(
        study_dir=str(study_dir.absolute()),
        configs={cell.name: to_plain(cell.cfg) for cell in cells},
        codes={cell.name: code_fingerprint(locate(cell.cfg.ffn.target)) for cell in cells},
        threads=resources.threads_per_cell(launcher_cfg, len(cells)),
        leader=leader,
        dies_with_leader=resources.dies_with_command(launcher_cfg),
        cwd=str(Path.cwd()),
        argv=list(sys.argv),
        path=list(sys.path),
    )
    for name in ("hydra", "hydra_plugins"):  # they announce each job; its own lines say more
        logging.getLogger(name).setLevel(logging.WARNING)
    with _signals(study_dir, leader):

        def launch(jobs: list[Cell]) -> None:
            launcher = Plugins.instance().instantiate_launcher(
                hydra_context=sweep.context, task_function=task, config=sweep.master
            )
            resources.leave_signals_to_command(launcher)
            launcher.launch([_job(cell, study_dir) for cell in jobs], initial_job_idx=0)

        try:
            _launch_all(study_dir, to_run, launch, lambda: bool(worker.asked_to_stop(study_dir, leader)))
        finally:
            resources.dismiss_workers(launcher_cfg)
    stopped = worker.asked_to_stop(study_dir, leader)
    for cell in _with_status(study_dir, to_run, "running") if stopped else []:
        if not is_running(study_dir, cell.name):  # ended before it could say so
            manifest.update_cell(study_dir, cell.name, status="interrupted")
    return stopped


def _job(cell: Cell, study_dir: Path) -> list[str]:
    # Absolute, as a worker may start in another folder.
    where = [override("hydra.sweep.dir", study_dir.absolute()), f"hydra.sweep.subdir={cell.name}"]
    return [*cell.overrides, override("study", str(cell.cfg.study)), *where]


def _launch_all(
    study_dir: Path, to_run: list[Cell], launch: Callable[[list[Cell]], None], stopped: Callable[[], bool]
) -> None:
    """Launch, and go on when the launcher itself gives up: a worker was killed, for want of memory, say.

    It does not say whose. So each cell that was running then is run alone: the one that dies again has failed.
    """
    while to_run and not stopped():
        try:
            return launch(to_run)
        except Exception as error:
            if stopped():  # the signal that stops the command has ended a worker too
                return None
            time.sleep(2 * worker.WATCH_S)  # let what is dying die
            suspects = _with_status(study_dir, to_run, "running")
            if not suspects:
                raise
            print(f"a worker process died ({_first_line(error)}); trying its cells one by one", file=sys.stderr)
        for cell in suspects:
            try:
                if not stopped():
                    launch([cell])
            except Exception as error:
                message = f"its process died: {_first_line(error)}"
                manifest.update_cell(study_dir, cell.name, status="failed", error=message)
                print(f"{cell.name}: failed: {message}", file=sys.stderr, flush=True)
        to_run = _with_status(study_dir, to_run, "pending")


def _with_status(study_dir: Path, cells: list[Cell], status: str) -> list[Cell]:
    entries = manifest.entries(study_dir)
    return [cell for cell in cells if entries[cell.name].get("status") == status]


def _first_line(error: Exception) -> str:
    first = (str(error).strip().splitlines() or ["no details"])[0]
    return f"{type(error).__name__}: {first.partition('. ')[0]}"


@contextmanager
def _signals(study_dir: Path, leader: worker.Leader) -> Iterator[None]:
    """Ctrl-C and SIGTERM let the running cells save themselves, and no other begin. A second Ctrl-C quits at once."""
    seen: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        if seen and signum == signal.SIGINT:
            raise KeyboardInterrupt
        seen.append(signum)
        worker.ask_to_stop(study_dir, leader, signum)
        os.write(2, b"\nstopping: cells save themselves after this step; Ctrl-C again quits at once\n")
        for entry in manifest.entries(study_dir).values():
            pid = entry.get("pid")
            if entry.get("status") == "running" and entry.get("host") == leader.host and pid not in (None, leader.pid):
                try:
                    os.kill(int(pid), signal.SIGTERM)
                except ProcessLookupError:
                    continue

    ours = [s for s in SIGNALS if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]  # nohup's stays ignored
    before = {signum: signal.signal(signum, note) for signum in ours}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


# -- the end --------------------------------------------------------------------------------------------------------


def _summary(study_dir: Path, cells: Sequence[Cell], stopped: int) -> int:
    leader = worker.Leader.here()
    worker.forget_stop(study_dir, leader)
    entries = manifest.entries(study_dir)
    by_status: dict[str, list[str]] = {}
    for cell in cells:
        by_status.setdefault(str(entries[cell.name].get("status")), []).append(cell.name)
    counts = ", ".join(f"{len(names)} {status}" for status, names in by_status.items())
    worker.say(f"study {study_dir.name}: {counts}")
    bad = [name for status in ("failed", "diverged") for name in by_status.get(status, [])]
    for name in bad:
        print(f"{name}: {entries[name]['status']}: {entries[name].get('error')}", file=sys.stderr)
    if stopped:
        print(f"stopped; the same command goes on: {command()}", file=sys.stderr, flush=True)
        return Interrupted(stopped).exit_code
    return 1 if bad or len(by_status.get("finished", [])) < len(cells) else 0
