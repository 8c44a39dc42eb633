"""What can be set: one typed configuration for a run, and what a study's command adds."""

import dataclasses
import functools
import typing
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from ffnlab.data.config import CopyData, HubData, ShakespeareData, TextData
from ffnlab.model.config import ModelConfig
from ffnlab.schema import STRICT, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Rate

DataConfig = Annotated[ShakespeareData | TextData | HubData | CopyData, Field(discriminator="kind")]

# YAML has no other way of writing `study: 2026`; a float or a boolean would not come back as it was written.
Name = Annotated[str, BeforeValidator(lambda name: str(name) if type(name) is int else name)]


@dataclass(config=STRICT)
class FFNConfig:
    """The block: a class that keeps the contract, its options, and how its ``down`` projection starts."""

    name: str
    target: str
    options: dict[str, Any]
    down_init: Literal["normal", "scaled", "zero"] = "scaled"


@dataclass(config=STRICT)
class BudgetConfig:
    """What is held equal; see ``ffnlab.budget.solve``."""

    kind: Literal["params", "flops", "none"] = "params"
    multiple_of: PositiveInt = 8
    tolerance: NonNegativeFloat = 0.01
    d_ff: PositiveInt | None = None


@dataclass(config=STRICT)
class OptimConfig:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) and its schedule, counted in optimiser steps.

    The rate climbs linearly over ``warmup`` steps, then stays (``constant``) or falls to ``lr * final_lr_ratio`` at the
    last step, along a line (``linear``) or half a cosine (``cosine``). Weight decay touches matrices only.
    """

    lr: NonNegativeFloat = 3e-3
    weight_decay: NonNegativeFloat = 0.1
    beta1: Rate = 0.9
    beta2: Rate = 0.95
    eps: PositiveFloat = 1e-8
    warmup: NonNegativeInt = 50
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    final_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    grad_clip: NonNegativeFloat = 1.0  # 0 turns clipping off


@dataclass(config=STRICT)
class TrainConfig:
    """Length and rhythm of a run.

    ``batch_size`` counts the sequences of one optimiser step, over all devices and accumulated parts, so the losses do
    not depend on how a step is cut up. ``val_tokens`` is the fixed part of the validation set that is read on the way;
    the final validation reads the whole set. Left out, ``val_every`` is 250 steps, and a twentieth of a run of
    more than 5,000: so that validation and census stay a small share of a long run.
    """

    tokens: PositiveInt = 1_536_000
    batch_size: PositiveInt = 8
    log_every: PositiveInt = 10
    val_every: PositiveInt | None = None
    val_tokens: PositiveInt = 32_768
    val_batch_size: PositiveInt = 16
    compile: bool = False
    checkpoint_blocks: bool = False

    def validation_interval(self, n_steps: int) -> int:
        """Optimiser steps between two validations of a run of ``n_steps``."""
        return self.val_every or max(250, n_steps // 20)


@dataclass(config=STRICT)
class CensusConfig:
    """Validation tokens that the neuron census counts: at each validation on the way, and at the end."""

    tokens: PositiveInt = 8_192
    final_tokens: PositiveInt = 65_536


@dataclass(config=STRICT)
class WandbConfig:
    """Weights & Biases. ``mode=auto``: online where a key is configured and the server answers, else offline."""

    kind: Literal["wandb"] = "wandb"
    project: Name = "ffnlab"
    entity: Name | None = None
    mode: Literal["auto", "online", "offline"] = "auto"


@dataclass(config=STRICT)
class NoLogger:
    """The ledger alone."""

    kind: Literal["none"] = "none"


@dataclass(config=STRICT)
class CopyTaskConfig:
    """The goal of ``experiment=copy_task``: a run that has one ends when it is reached, and fails otherwise.

    ``loss``: nats per token of the copied half. ``generalise``: trained on fresh sequences, measured on held-out ones
    (the data follows this key).
    """

    loss: PositiveFloat = 0.01
    generalise: bool = False


@dataclass(config=STRICT)
class RunConfig:
    """Everything that defines a run. ``trainer`` holds ``lightning.Trainer``'s own arguments."""

    ffn: FFNConfig
    model: ModelConfig
    data: DataConfig
    budget: BudgetConfig
    optim: OptimConfig
    train: TrainConfig
    census: CensusConfig
    trainer: dict[str, Any]
    logger: Annotated[WandbConfig | NoLogger, Field(discriminator="kind")]
    seed: NonNegativeInt = 0
    init_seed: NonNegativeInt = 0
    data_seed: NonNegativeInt = 0
    study: Annotated[Name, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")] | None = None  # a folder name
    copy_task: CopyTaskConfig | None = None


@dataclass(config=STRICT)
class StudyConfig:
    """How a study is run and read; nothing here changes what a cell computes.

    ``fresh_seeds``: once the cells of the sweep have run, each block is run on these seeds at the learning rate that
    did best (``kind=lr_sensitivity``).
    """

    analysis: Literal["unpaired", "paired"] | None = None
    baseline: Name | None = None
    retry: bool = False
    stale: Literal["keep", "rerun"] | None = None
    kind: Literal["blocks", "noise_floor", "lr_sensitivity"] | None = None
    fresh_seeds: list[NonNegativeInt] | None = None


STUDY_KEYS = tuple(StudyConfig.__dataclass_fields__)


@functools.cache
def text_keys() -> frozenset[str]:
    """The dotted keys whose values are text: names and paths."""
    return frozenset(_text_keys(RunConfig)) | frozenset(_text_keys(StudyConfig))


def _text_keys(kind: Any, key: str = "") -> set[str]:
    if kind is str:
        return {key}
    if dataclasses.is_dataclass(kind):
        inner = {f"{key}.{name}".lstrip("."): of for name, of in typing.get_type_hints(kind).items()}
        return {text for name, of in inner.items() for text in _text_keys(of, name)}
    if typing.get_origin(kind) in (Literal, dict):
        return set()
    return {text for of in typing.get_args(kind) for text in _text_keys(of, key)}
