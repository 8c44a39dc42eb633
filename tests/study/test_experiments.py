"""Every preset composes, says what it asks, and runs two steps of every one of its configurations."""

from pathlib import Path

import pytest
from commands import BASIC, TINY, manifest, statuses

from ffnlab.composition import CONF, compose_job
from ffnlab.errors import UserError
from ffnlab.study.cells import Cell, configuration
from ffnlab.study.load import load_study
from ffnlab.study.preflight import preflight
from ffnlab.study.rates import choose_rates, fresh_cells
from ffnlab.study.runner import run_study
from ffnlab.study.sweep import make_cells, study_name, take_apart
from ffnlab.training import prepare_run

# preset: blocks, configurations apart from seeds, cells
PRESETS = {
    "glu_variants": ({"relu", "gelu", "silu", "glu", "bilinear", "geglu", "swiglu", "reglu"}, 8, 48),
    "zero_init": ({"gelu", "swiglu"}, 6, 36),
    "dropout_placement": ({"gelu", "swiglu"}, 8, 48),
    "norm_placement": ({"gelu"}, 6, 36),
    "expansion": ({"gelu"}, 5, 30),
    "swish_beta": ({"swish"}, 8, 48),
    "noise_floor": ({"gelu"}, 1, 16),
    "lr_sensitivity": ({"relu", "gelu", "swiglu"}, 12, 24),
}


def cells_of(*words: str) -> list[Cell]:
    sweep, _ = take_apart(list(words), None, several=True)
    return make_cells(sweep.jobs, study_name(sweep.master, sweep.typed), None)


def quick(preset: str) -> list[str]:
    """TINY without what the preset varies."""
    swept = {word.partition("=")[0] for word in compose_job([f"experiment={preset}"]).sweeps}
    return [word for word in TINY if word.partition("=")[0] not in swept]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_composes_and_runs_two_steps(preset: str) -> None:
    blocks, n_configurations, n_cells = PRESETS[preset]
    sweep, _ = take_apart([f"experiment={preset}"], None, several=True)
    assert len(sweep.jobs) == n_cells
    one_seed = [job for job in sweep.jobs if not any(o.startswith("seed=") and o != "seed=0" for o in job)]
    cells = make_cells([[*job, *quick(preset)] for job in one_seed], preset, None)
    assert {cell.cfg.ffn.name for cell in cells} == blocks
    assert len({configuration(cell.cfg) for cell in cells}) == n_configurations
    assert preflight(cells, on_cpu=True) == n_configurations


def test_every_preset_of_a_study_has_a_sentence() -> None:
    for preset in PRESETS:
        first, second, *_ = (CONF / "experiment" / f"{preset}.yaml").read_text().splitlines()
        assert first == "# @package _global_"
        assert second.startswith("# ")
        assert len(second) > 40


def test_what_is_typed_wins_over_the_preset() -> None:
    cells = cells_of("experiment=glu_variants", "ffn=relu,gelu", "seed=7,8", *TINY)
    assert [(cell.cfg.ffn.name, cell.cfg.seed) for cell in cells] == [
        ("relu", 7), ("relu", 8), ("gelu", 7), ("gelu", 8),
    ]  # fmt: skip


def test_a_preset_gives_the_study_its_name() -> None:
    for words, name in (
        (["experiment=zero_init"], "zero_init"),
        (["experiment=zero_init", "retry=true", "trainer=cpu", "logger=none"], "zero_init"),
        (["experiment=zero_init", "study=mine"], "mine"),
    ):
        sweep, _ = take_apart(words, None, several=True)
        assert study_name(sweep.master, sweep.typed) == name
    sweep, _ = take_apart(["experiment=zero_init", "train.tokens=4096"], None, several=True)
    assert study_name(sweep.master, sweep.typed).startswith("zero_init-")


def test_a_preset_without_m_is_refused(run_script) -> None:
    done = run_script("train.py", "experiment=zero_init")
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["error: experiment=zero_init is a study of several runs: add -m"]


def test_expansion_keeps_the_networks_parameters_equal() -> None:
    wanted = ["seed=0", *(word for word in TINY if "layers" not in word)]
    sizes = {}
    for cell in cells_of("experiment=expansion", *wanted):
        network = prepare_run(cell.cfg).network
        matrices = sum(p.numel() for n, p in network.named_parameters() if p.ndim > 1 and n.startswith("blocks."))
        sizes[cell.cfg.budget.d_ff, cell.cfg.model.n_layers] = matrices
    d = 24
    assert set(sizes) == {(4 * d, 4), (d, 8), (2 * d, 6), (6 * d, 3), (10 * d, 2)}
    assert set(sizes.values()) == {48 * d * d}


def test_noise_floor_crosses_the_seeds() -> None:
    cells = cells_of("experiment=noise_floor", *TINY)
    assert {(cell.cfg.init_seed, cell.cfg.data_seed) for cell in cells} == {(i, j) for i in range(4) for j in range(4)}


@pytest.mark.slow
def test_rates_are_chosen_on_tuning_seeds_and_compared_on_fresh_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = [
        BASIC, "experiment=lr_sensitivity", "ffn=relu,swiglu", "optim.lr=1e-5,1e-2", "seed=0", "fresh_seeds=[5,6]",
        "study=r", *TINY,
    ]  # fmt: skip
    assert run_study(command) == 0
    said = capsys.readouterr().out
    assert "relu: learning rate 0.01" in said
    assert "at the edge of the grid" in said
    record = manifest(tmp_path / "outputs" / "r")
    assert (record["kind"], record["tuning_seeds"]) == ("lr_sensitivity", [0])
    assert len(record["cells"]) == 2 * 2 + 2 * 2
    study = load_study(tmp_path / "outputs" / "r")
    rates = choose_rates(study.cells, [0])
    assert {rate.arm: rate.lr for rate in rates} == {"relu": 0.01, "swiglu": 0.01}
    assert sorted(fresh_cells(study.cells, rates, [5, 6])["seed"]) == [5, 5, 6, 6]
    assert run_study(command) == 0
    assert "starts" not in capsys.readouterr().out
    assert len(statuses(tmp_path / "outputs" / "r")) == 8
    with pytest.raises(UserError, match=r"seeds \[0\] are both for tuning and fresh"):
        run_study([word.replace("[5,6]", "[0,6]") for word in command])
