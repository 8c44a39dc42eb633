"""Cores and GPUs shared out among the cells that run at the same time."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from omegaconf import DictConfig

from ffnlab.composition import cores
from ffnlab.config import RunConfig
from ffnlab.errors import UserError
from ffnlab.signals import leave_signals_to_parent


def check_one_device(cfg: RunConfig) -> None:
    """A cell of a study has one device.

    Several devices would be several processes, and Lightning starts those by running the whole command again: the
    second process would run the whole study again.

    Raises:
        UserError: a configuration that asks for more than one.
    """
    trainer = cfg.trainer
    devices = trainer.get("devices", 1)
    one = devices in (1, "1", "auto") or (isinstance(devices, list) and len(devices) == 1)
    strategy = trainer.get("strategy", "auto")
    if not one or trainer.get("num_nodes", 1) != 1 or strategy not in ("auto", "single_device"):
        raise UserError(
            f"a cell of a study runs on one device, not with trainer.devices={devices} and strategy={strategy}: each "
            "further process would start the whole study again. Use trainer.devices=1, and run cells side by side"
        )


def threads_per_cell(launcher: DictConfig, n_cells: int) -> int | None:
    """Threads of each cell, so that the cells that run together have no more than there are cores; None: as they are.

    It follows from the command alone, not from what is left to do: the same cell gets the same number in a study that
    was interrupted, and so the same sums.
    """
    target = str(launcher.get("_target_", ""))
    if "joblib" in target:
        wanted = int(launcher.n_jobs)
        at_once = wanted if wanted > 0 else max(1, cores() + 1 + wanted)
        return max(1, cores() // min(at_once, n_cells))
    if "ray" in target:
        return max(1, int((launcher.ray.get("remote") or {}).get("num_cpus") or 1))
    if "submitit" in target:
        return max(1, int(launcher.get("cpus_per_task") or 1))
    return None


def in_background(launcher: DictConfig) -> bool:
    """Whether cells run in processes of their own, apart from the command."""
    return "basic_launcher" not in str(launcher.get("_target_", ""))


def dies_with_command(launcher: DictConfig) -> bool:
    """Whether cells should stop when the command is killed: on one machine yes, on a cluster no."""
    target = str(launcher.get("_target_", ""))
    if "ray" in target:
        return not (launcher.ray.get("init") or {}).get("address")
    return "joblib" in target or "LocalLauncher" in target


@contextmanager
def one_gpu(cfg: RunConfig) -> Iterator[None]:
    """Give the cell a GPU of its own where there are several, by a lock that every study on this machine respects.

    A worker process is used for one cell after the other, so CUDA_VISIBLE_DEVICES cannot do it: it counts only until
    CUDA starts. With more cells than GPUs they share.
    """
    import torch

    wants = cfg.trainer.get("accelerator", "auto") in ("auto", "gpu", "cuda")
    count = torch.cuda.device_count() if wants and torch.cuda.is_available() else 0
    if count < 2 or isinstance(cfg.trainer.get("devices"), list):
        yield
        return
    folder = Path(tempfile.gettempdir()) / f"ffnlab-gpus-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for index in range(count):
        lock = FileLock(folder / f"{torch.cuda.get_device_properties(index).uuid}.lock", thread_local=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            continue
        try:
            cfg.trainer["devices"] = [index]
            yield
        finally:
            lock.release()
        return
    cfg.trainer["devices"] = [os.getpid() % count]
    yield


def leave_signals_to_command(launcher: Any) -> None:
    """Let joblib's workers wait through a signal that a terminal sends to all processes of the command."""
    if "joblib" in type(launcher).__module__:
        launcher.joblib["initializer"] = leave_signals_to_parent


def dismiss_workers(launcher: DictConfig) -> None:
    """End idle workers with the study: joblib's would stay for another five minutes, and the command with them."""
    target = str(launcher.get("_target_", ""))
    if "joblib" in target:
        from joblib.externals.loky import reusable_executor

        executor = getattr(reusable_executor, "_executor", None)
        if executor is not None:
            executor.shutdown(wait=True, kill_workers=True)
    elif "ray" in target:
        import ray

        ray.shutdown()  # a cluster that was joined goes on; one that was started here ends


def lend_path(folders: list[str]) -> None:
    """Let processes started from here import what this one can: the project, and a block beside the command."""
    known = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*known, *folders]))


@contextmanager
def clean_torch() -> Iterator[None]:
    """Settings of the whole process, which a cell's trainer may change, go back for the next cell."""
    import torch

    deterministic = torch.are_deterministic_algorithms_enabled()
    dtype = torch.get_default_dtype()
    matmul = torch.get_float32_matmul_precision()
    benchmark = torch.backends.cudnn.benchmark
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.benchmark = benchmark
