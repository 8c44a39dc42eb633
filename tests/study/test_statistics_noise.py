import numpy as np
import pandas as pd
import pytest

from ffnlab.errors import UserError
from ffnlab.study.noise import noise_floor
from ffnlab.study.power import seeds_needed
from ffnlab.study.rates import choose_rates, fresh_cells, split_seeds


def cells(grid):
    return pd.DataFrame(
        [{"init_seed": i, "data_seed": j, "loss": float(v)} for (i, j), v in np.ndenumerate(np.asarray(grid, float))]
    )


def test_components_by_hand():
    # rows 1 3 / 5 11: grand mean 5; MS init 36, MS data 16, MS rest 4 (each with one degree of freedom)
    floor = noise_floor(cells([[1, 3], [5, 11]]))
    init, data, rest = floor.components
    assert [c.mean_square for c in floor.components] == pytest.approx([36, 16, 4])
    assert [init.variance, data.variance, rest.variance] == pytest.approx([16, 6, 4])
    assert floor.sd == pytest.approx(26**0.5)
    assert sum(c.share for c in floor.components) == pytest.approx(1)
    assert floor.mean == pytest.approx(5)


def test_negative_components_are_zero_and_say_so():
    floor = noise_floor(cells([[0, 1], [1, 0]]))
    assert floor.components[0].variance == 0
    assert floor.components[0].negative


def test_components_are_recovered_from_a_large_grid():
    rng = np.random.default_rng(0)
    grid = 2 + 3 * rng.standard_normal((60, 1)) + 1 * rng.standard_normal((1, 60)) + 0.5 * rng.standard_normal((60, 60))
    floor = noise_floor(cells(grid))
    assert [c.sd for c in floor.components] == pytest.approx([3, 1, 0.5], rel=0.25)


def test_aa_arms_share_no_seed():
    # With only init seeds mattering, two arms that shared an init seed could tie; disjoint ones cannot.
    floor = noise_floor(cells(np.array([[1.0], [10], [100], [1000]]) + np.zeros((1, 4)) + np.eye(4) * 1e-9))
    assert floor.arm_size == 2
    assert floor.pairs == 72  # 3 ways to split the rows, 4! / 2 pairings with columns over 2 orders
    assert min(floor.aa_differences) > 100
    assert floor.aa_resolved is None


def test_aa_verdicts_on_a_grid_that_allows_them():
    rng = np.random.default_rng(1)
    floor = noise_floor(cells(rng.standard_normal((6, 6))))
    assert floor.arm_size == 3
    assert floor.aa_resolved is not None
    assert floor.aa_resolved < 0.15 * floor.pairs


def test_seeds_for_a_gap():
    rng = np.random.default_rng(2)
    floor = noise_floor(cells(1.9 + 0.01 * rng.standard_normal((4, 4))))
    assert floor.seeds_for_gap[0.01][1] == seeds_needed(0.01, floor.sd, floor.sd)
    assert floor.seeds_for_gap[0.01][7] > floor.seeds_for_gap[0.01][1]
    assert floor.chance_gap[4] == pytest.approx(1.96 * floor.sd * (2 / 4) ** 0.5, rel=1e-3)


@pytest.mark.parametrize("grid", [[[1, 2, 3]], [[1, np.nan], [2, 3]]])
def test_grids_that_do_not_answer(grid):
    with pytest.raises(UserError, match="noise floor"):
        noise_floor(cells(grid))


def rate_cells(table):
    rows = [{"arm": a, "lr": lr, "seed": s, "loss": loss, "cell": f"{a}{lr}{s}"} for (a, lr, s), loss in table.items()]
    return pd.DataFrame(rows)


def test_the_rate_is_chosen_on_tuning_seeds_alone():
    # On the fresh seed 0.1 would win; it must not be looked at.
    table = rate_cells(
        {
            ("a", 0.1, 0): 2.0,
            ("a", 0.2, 0): 1.0,
            ("a", 0.3, 0): 3.0,
            ("a", 0.1, 1): 0.0,
            ("a", 0.2, 1): 9.0,
            ("a", 0.3, 1): 9.0,
        }
    )
    (rate,) = choose_rates(table, [0])
    assert (rate.lr, rate.at_edge, rate.tried) == (0.2, False, [0.1, 0.2, 0.3])
    assert list(fresh_cells(table, [rate], [1])["loss"]) == [9.0]


def test_a_rate_that_lost_a_tuning_run_is_left_out():
    table = rate_cells({("a", 0.1, 0): 2.0, ("a", 0.1, 1): 2.0, ("a", 0.9, 0): 1.0, ("a", 0.9, 1): np.nan})
    (rate,) = choose_rates(table, [0, 1])
    assert (rate.lr, rate.lost, rate.at_edge) == (0.1, [0.9], True)
    (none,) = choose_rates(rate_cells({("a", 0.1, 0): np.nan, ("a", 0.2, 0): np.nan}), [0])
    assert none.lr is None


def test_seed_split():
    assert split_seeds([5, 1, 3, 0, 2, 4]) == ([0, 1], [2, 3, 4, 5])
    assert split_seeds([0, 1, 2], tuning=[2]) == ([2], [0, 1])
    with pytest.raises(UserError, match="fresh"):
        split_seeds([0])
    with pytest.raises(UserError, match="fresh"):
        split_seeds([0, 1], tuning=[7])
