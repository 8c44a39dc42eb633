"""The speeds that this project wants of itself, each a ratio within one run."""

from dataclasses import dataclass

from ffnlab.bench.race import Race, Spread

# shape -> (contender that ffnlab is held against, times as fast as it)
WANTED: dict[str, dict[str, float]] = {
    "nanogpt-cpu": {"bare": 0.98, "gpt2": 1.35, "x-transformers": 1.15},
    "tiny": {"bare": 0.98, "gpt2": 1.30, "x-transformers": 1.10},
}
PRODUCT_SHARE = 0.65


@dataclass(frozen=True)
class Target:
    """What was wanted, what was measured."""

    what: str
    wanted: float
    measured: Spread

    @property
    def met(self) -> bool:
        """By the median."""
        return self.measured.median >= self.wanted


def judge(race: Race) -> list[Target]:
    """Hold a race against what is wanted at its shape."""
    found = []
    for against, wanted in WANTED.get(race.setting.shape, {}).items():
        if {"ffnlab", against} <= set(race.records):
            found.append(Target(f"ffnlab / {against}", wanted, race.speed("ffnlab", against)))
    if race.setting.shape in WANTED and {"ffnlab", "products"} <= set(race.records):
        # Steps a second over products a second: the share of the products' own rate that a whole step reaches.
        found.append(Target("rate of the products alone", PRODUCT_SHARE, race.speed("ffnlab", "products")))
    return found
