"""A study's answer in figures: one `Arm` a block, what was concluded about each, and what lies far out."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ffnlab.study.checks import Problem
from ffnlab.study.load import Study
from ffnlab.study.noise import NoiseFloor
from ffnlab.study.rates import Rate

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Answer:
    """One arm against the baseline by one analysis; differences are arm minus baseline in nats, negative is better."""

    analysis: str
    primary: bool  # declared before the study ran; the other is exploratory
    verdict: str
    n: int
    n_baseline: int
    difference: float
    low: float  # marginal 95% interval
    high: float
    wide_low: float  # simultaneous 95% interval
    wide_high: float
    p: float  # of the t test, one block alone
    p_adjusted: float  # Holm, guarded degrees of freedom: what the verdict follows
    p_adjusted_plain: float  # Holm over `p`
    p_resampled: float  # permutation (unpaired) or sign flips (paired)
    p_resampled_exact: bool
    p_resampled_floor: float  # no smaller p can come from this many seeds
    bca: tuple[float, float] | None
    detectable: float  # difference found with 80% power
    seeds_needed: int | None  # to resolve the observed difference with 80% power
    note: str = ""


@dataclass(frozen=True)
class Arm:
    """One block (with whatever else varies) over its seeds."""

    name: str
    block: str
    baseline: bool
    lr: float | None
    counts: dict[str, int]  # cells by status
    n: int
    mean: float
    sd: float
    bpb: float
    perplexity: float
    losses: dict[int, float]  # by seed
    d_ff: float
    params: float
    ffn_params: float
    flops: float  # training FLOPs a token
    mismatch: float
    matched: bool | None
    tokens_per_s: float
    figures: dict[str, float]
    by_layer: dict[str, list[float]]
    ranges: dict[str, tuple[float, float]]  # of `figures` over seeds, lowest and highest
    layer_ranges: dict[str, list[tuple[float, float]]]
    answers: list[Answer]  # the primary one first; none for the baseline
    correlation: float  # with the baseline over shared seeds
    variance_ratio: float

    @property
    def primary(self) -> Answer | None:
        """The declared analysis."""
        return self.answers[0] if self.answers else None


@dataclass(frozen=True)
class Outlying:
    """A finished run far from the others of its arm: ``distance`` in robust SDs, above or below the median."""

    arm: str
    init_seed: int
    data_seed: int
    loss: float
    distance: float


@dataclass(frozen=True)
class Analysis:
    """A study's whole answer."""

    study: Study
    problems: list[Problem]
    arms: list[Arm]
    correlations: dict[str, dict[str, float]]
    comparisons: int  # blocks that Holm ran over
    limits: list[str]
    rates: list[Rate] = field(default_factory=list)
    tuning_seeds: list[int] = field(default_factory=list)
    noise: NoiseFloor | None = None
    compared: "pd.DataFrame | None" = None  # the cells that entered the comparison
    scale: str = ""  # model, tokens and seeds in a phrase
    outlying: list[Outlying] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)  # what else about a block changes how its loss is read

    @property
    def baseline(self) -> Arm:
        """The arm that others are compared with."""
        return next(arm for arm in self.arms if arm.baseline)
