"""The callback in a real Trainer: moments, names, files, resume."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor

from ffnlab.census import NonFiniteError
from ffnlab.census.callback import CensusCallback
from ffnlab.errors import UserError
from ffnlab.ffn import DenseFFN, GatedFFN
from ffnlab.model import LanguageModel, ModelConfig

CONTEXT, VOCAB, LAYERS, D_FF = 16, 50, 2, 24
N, N_FINAL = 200, 700


class Tokens:
    """Validation tokens with the face of the project's data, the last window padded."""

    def __init__(self, n_tokens: int = 1000) -> None:
        self.targets = torch.randint(VOCAB, (n_tokens,), generator=torch.Generator().manual_seed(3))

    def val_batches(self, batch_size: int, limit_tokens: int | None = None):
        count = min(len(self.targets), limit_tokens or len(self.targets))
        rows = math.ceil(count / CONTEXT)
        targets = torch.full((rows * CONTEXT,), -100)
        targets[:count] = self.targets[:count]
        targets = targets.view(rows, CONTEXT)
        inputs = targets.clamp(min=0)
        return zip(inputs.split(batch_size), targets.split(batch_size), strict=True)


class Memory(Logger):
    """Keeps what is logged."""

    name, version = "memory", "0"

    def __init__(self) -> None:
        super().__init__()
        self.points: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.points.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class Module(lightning.LightningModule):
    def __init__(self, block: type = DenseFFN, activation: str = "relu", lr: float = 5.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = ModelConfig(d_model=12, n_layers=LAYERS, n_heads=2, context_length=CONTEXT)
        self.network = LanguageModel(config, VOCAB, lambda: block(12, D_FF, activation, bias=True))
        self.lr = lr
        self.share = (1, 0)

    def whole_network(self) -> LanguageModel:
        return self.network

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.network.loss(*batch)

    def validation_step(self, batch: Any, index: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(9)
    tokens = torch.randint(VOCAB, (6, 8, CONTEXT + 1), generator=generator)
    return [(rows[:, :-1], rows[:, 1:]) for rows in tokens]


class Steps(torch.utils.data.IterableDataset):
    """The batches from a step on, so that a resumed run sees what it would have seen."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __iter__(self):
        return iter(batches()[self.first :])


def run(
    run_dir: Path,
    steps: int = 6,
    module: Module | None = None,
    resume: Path | None = None,
    save: Path | None = None,
    validate: bool = True,
    data: Tokens | None = None,
) -> tuple[CensusCallback, Memory]:
    callback = CensusCallback(data or Tokens(), run_dir, N, N_FINAL, batch_size=4, gradient_batches=2)
    memory, module = Memory(), module or Module()
    trainer = lightning.Trainer(
        max_steps=steps,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        max_epochs=-1,
        num_sanity_val_steps=-1,
        logger=[memory],
        callbacks=[callback],
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    loader = torch.utils.data.DataLoader(Steps(4 if resume else 0), batch_size=None)
    val = torch.utils.data.DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, loader, val, ckpt_path=str(resume) if resume else None, weights_only=True)
    if save:
        trainer.save_checkpoint(save)
    if validate:
        trainer.validate(module, val, verbose=False)
    return callback, memory


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CensusCallback, Memory]:
    run_dir = tmp_path_factory.mktemp("run")
    return run_dir, *run(run_dir)


def test_every_validation_has_a_census_and_the_first_is_before_the_first_step(finished) -> None:
    _, callback, memory = finished
    assert [step for step, _ in memory.points] == [0, 2, 4, 6]
    assert all(point["census/n"] == N for _, point in memory.points)
    assert callback.final["census/n"] == N_FINAL


def test_names_have_one_slash_and_every_layer(finished) -> None:
    _, callback, memory = finished
    first, last = memory.points[0][1], memory.points[-1][1]
    for name in (*last, *callback.final):
        assert name.count("/") == 1, name
    sections = {name.split("/")[0] for name in last}
    assert sections == {"dead", "gate", "dormant", "sparsity", "health", "census"}
    per_layer = {"dead/rel", "dead/exact", "dead/contrib", "dead/gradient", "dead/revived", "dead/newly_dead"}
    per_layer |= {"dead/rel_n16", "dead/rel_n4", "gate/never_open", "dormant/rate", "sparsity/zero", "sparsity/rel"}
    for name in per_layer:
        values = [last[f"{name}_L{layer}"] for layer in range(LAYERS)]
        assert last[name] == pytest.approx(np.mean(values))
    # before the first update there is no gradient death to speak of, and nothing to compare with
    assert not {"dead/gradient", "dead/revived", "dead/newly_dead"} & first.keys()
    assert not {"dead/revived", "dead/newly_dead"} & callback.final.keys()
    assert "health/residual_rms_L1" in first


def recomputed(rows: pd.DataFrame) -> dict[str, float]:
    """Every figure of one census from the parquet file, by the definitions in words."""
    figures: dict[str, list[float]] = {}
    for _, layer in rows.groupby("layer"):
        rms = math.sqrt(layer.mean_square.mean())
        found = {
            "dead/rel": (layer.max_abs <= 1e-3 * rms).mean(),
            "dormant/rate": (layer.mean_abs / layer.mean_abs.mean() <= 0.025).mean(),
            "sparsity/zero": layer.zeros.sum() / (layer.n * 1.0).sum(),
            "sparsity/rel": layer.below.sum() / (layer.n * 1.0).sum(),
        }
        for at in ("n16", "n4"):
            part = math.sqrt(layer[f"mean_square_{at}"].mean())
            found[f"dead/rel_{at}"] = (layer[f"max_abs_{at}"] <= 1e-3 * part).mean()
        if layer.exact_zero.all():
            found["dead/exact"] = (layer.max_abs == 0).mean()
        if layer.max_pre.notna().all():
            found["gate/never_open"] = (layer.max_pre <= 0).mean()
        contribution = layer.max_abs * layer.column_norm
        rms = math.sqrt((layer.mean_square * layer.column_norm**2).mean())
        found["dead/contrib"] = (contribution <= 1e-3 * rms).mean()
        if layer.gradient.notna().all():
            found["dead/gradient"] = (layer.gradient <= 1e-3 * layer.gradient.mean()).mean()
        for name, value in found.items():
            figures.setdefault(name, []).append(value)
    named = {f"{name}_L{layer}": value for name, values in figures.items() for layer, value in enumerate(values)}
    return named | {name: float(np.mean(values)) for name, values in figures.items()}


def test_every_logged_figure_can_be_recomputed_from_the_parquet_file(finished) -> None:
    run_dir, callback, memory = finished
    table = pd.read_parquet(run_dir / "census.parquet")
    assert not (run_dir / "census_parts").exists()
    assert len(table) == (4 + 1) * LAYERS * D_FF
    dead_before: pd.Series | None = None
    for step, point in [*memory.points, (6, callback.final)]:
        final = point is callback.final
        rows = table[(table.step == step) & (table.final == final)].sort_values(["layer", "neuron"])
        assert (rows.n == point["census/n"]).all()
        expected = recomputed(rows)
        rms = rows.groupby("layer").mean_square.transform("mean") ** 0.5
        dead = (rows.max_abs <= 1e-3 * rms).reset_index(drop=True)
        if dead_before is not None and not final:
            layers = rows.layer.reset_index(drop=True)
            for name, changed in (("revived", dead_before & ~dead), ("newly_dead", dead & ~dead_before)):
                shares = changed.groupby(layers).mean()
                expected |= {f"dead/{name}": shares.mean()}
                expected |= {f"dead/{name}_L{layer}": share for layer, share in shares.items()}
        dead_before = dead
        logged = {k: v for k, v in point.items() if not k.startswith(("health/", "census/"))}
        assert logged == pytest.approx(expected, abs=1e-12)


def test_something_happens_in_the_run_that_is_tested(finished) -> None:
    """The run above has to kill and revive neurons, or its equalities would say little."""
    *_, memory = finished
    assert max(point.get("dead/newly_dead", 0) for _, point in memory.points) > 0
    assert memory.points[-1][1]["dead/rel"] > 0


def test_the_picture_is_written(finished) -> None:
    run_dir, *_ = finished
    import matplotlib.image

    pixels = matplotlib.image.imread(run_dir / "census.png")
    assert pixels.shape[0] > 200
    assert pixels.shape[1] > 600
    assert pixels[..., :3].std() > 0.05


def test_a_resumed_run_equals_one_that_was_never_stopped(finished, tmp_path: Path) -> None:
    run_dir, callback, memory = finished
    _, before = run(tmp_path, steps=4, save=tmp_path / "last.ckpt", validate=False)
    # the process dies after the next census: its part is there, its checkpoint is not
    (tmp_path / "census_parts" / "000000005.parquet").write_bytes(
        (tmp_path / "census_parts" / "000000004.parquet").read_bytes()
    )
    resumed, after = run(tmp_path, resume=tmp_path / "last.ckpt")
    assert [*before.points, *after.points] == memory.points
    assert resumed.final == callback.final
    one, two = (pd.read_parquet(folder / "census.parquet") for folder in (run_dir, tmp_path))
    pd.testing.assert_frame_equal(one, two)
    # and its last act can be repeated
    again, _ = run(tmp_path, resume=tmp_path / "last.ckpt")
    assert again.final == callback.final
    pd.testing.assert_frame_equal(one, pd.read_parquet(tmp_path / "census.parquet"))


def test_training_is_not_touched(tmp_path: Path) -> None:
    """The weights after training are the same with and without a census, dropout included."""

    def weights(with_census: bool) -> list[Tensor]:
        module = Module(GatedFFN, "silu")
        module.network.drop_embedding.p = 0.2
        trainer = lightning.Trainer(
            max_steps=3,
            val_check_interval=1,
            logger=False,
            callbacks=[CensusCallback(Tokens(), tmp_path / str(with_census), N)] if with_census else [],
            accelerator="cpu",
            num_sanity_val_steps=-1,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        torch.manual_seed(7)
        loader = torch.utils.data.DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]
        trainer.fit(module, loader, loader)
        return [p.detach().clone() for p in module.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(weights(False), weights(True), strict=True))


def test_n_larger_than_the_validation_set_logs_the_true_n(tmp_path: Path) -> None:
    callback, memory = run(tmp_path, steps=2, data=Tokens(150))
    assert {point["census/n"] for _, point in memory.points} == {150}
    assert callback.final["census/n"] == 150


def test_a_non_finite_activation_stops_the_run(tmp_path: Path) -> None:
    module = Module()
    with torch.no_grad():
        module.network.blocks[1].ffn.up.weight[0, 0] = math.inf
    with pytest.raises(NonFiniteError, match="pre_activation of layer 1"):
        run(tmp_path, module=module)


def test_a_block_without_down_is_refused_with_the_contract(tmp_path: Path) -> None:
    module = Module()
    module.network.blocks[0].ffn = torch.nn.Linear(12, 12)
    with pytest.raises(UserError, match="no `down`"):
        run(tmp_path, module=module)


def test_a_step_is_measured_once(tmp_path: Path) -> None:
    """A resumed run may validate again at the step of its checkpoint; the ledger has that point already."""
    memory, callback = Memory(), CensusCallback(Tokens(), tmp_path, N)
    trainer = SimpleNamespace(
        global_step=4,
        is_global_zero=True,
        sanity_checking=False,
        state=SimpleNamespace(fn="fit"),
        loggers=[memory],
    )
    module = Module()
    for _ in range(2):
        callback.on_validation_end(trainer, module)  # type: ignore[arg-type]
    assert [step for step, _ in memory.points] == [4]


def test_wandb_gets_the_picture(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import WandbLogger

    images: list[tuple[str, list[str], int]] = []

    class View(WandbLogger):
        def __init__(self) -> None:
            self.points: list[int] = []

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            self.points.append(int(step or 0))

        def log_image(self, key: str, images_: list[Any], step: int | None = None, **kwargs: Any) -> None:
            images.append((key, images_, int(step or 0)))

    trainer = SimpleNamespace(
        global_step=4,
        is_global_zero=True,
        state=SimpleNamespace(fn="validate"),
        loggers=[View()],
    )
    CensusCallback(Tokens(), tmp_path, N, N_FINAL).on_validation_end(trainer, Module())  # type: ignore[arg-type]
    assert images == [("dead/rel_picture", [str(tmp_path / "census.png")], 4)]
