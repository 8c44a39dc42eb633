"""What Hydra says of a mistake, in words for the person who made it."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ffnlab.errors import UserError
from ffnlab.schema import nearest


@dataclass(frozen=True)
class Typed:
    """The overrides, the folders with choices (ours first), and a way to compose other overrides from them."""

    overrides: list[str]
    folders: list[Path]
    compose: Callable[[list[str]], DictConfig]


@contextmanager
def in_words(typed: Typed) -> Iterator[None]:
    """Turn what Hydra raises while it composes into a sentence for the person who typed.

    Raises:
        UserError: in place of Hydra's errors.
    """
    try:
        yield
    except MissingConfigException as error:
        raise UserError(_unknown_choice(error, typed)) from error
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise UserError(_composition_error(error, typed)) from error
    except (AssertionError, AttributeError) as error:  # Hydra's answer to a key below one that is null
        if not (sweeps := [_as_typed(word) for word in typed.overrides if "hydra.sweeper.params" in word]):
            raise
        raise UserError(f"hydra.sweeper.params is for experiment files: write -m {' '.join(sweeps)}") from error


def _as_typed(word: str) -> str:
    """``hydra.sweeper.params.seed="0,1"`` as a command line has it."""
    found = re.fullmatch(r"[+]*hydra\.sweeper\.params\.([\w.]+)=(['\"]?)(.*)\2", word)
    return f"{found[1]}={found[3]}" if found else "KEY=A,B"


def _unknown_choice(error: MissingConfigException, typed: Typed) -> str:
    missing = error.missing_cfg_file
    name = missing if isinstance(missing, str) else next(iter(missing or ()), "")
    group, _, choice = name.rpartition("/")
    options = [str(option) for option in error.options or []]
    if not options:
        return f"there is no configuration '{name}'"
    here = Path("conf", group, f"{choice}.yaml")
    if here.is_file() and not any(folder.samefile("conf") for folder in typed.folders):
        return f"{group}={choice} is unknown, but {here} is here: add --config-dir conf"
    return f"{group}={choice} is unknown{nearest(choice, options)}; choose one of {', '.join(sorted(options))}"


def _composition_error(error: Exception, typed: Typed) -> str:
    overrides = typed.overrides
    text = f"{error}\n{error.__cause__ or ''}"
    if "multirun" in text:
        swept = [o for o in overrides if "," in o or "range(" in o or "choice(" in o]
        thousands = [
            n.replace(",", "_") for o in swept if re.fullmatch(r"[1-9]\d{0,2}(,\d{3})+", n := o.partition("=")[2])
        ]
        meant = f"; for a number write {thousands[0]}" if thousands else ""
        return f"{' '.join(swept) or 'a list of values'} asks for several runs: add -m{meant}"
    unknown = re.search(r"Could not override '([^']+)'", text)
    if unknown:
        key = unknown.group(1)
        preset = next((o for o in overrides if o.lstrip("+").startswith("experiment=")), "")
        if preset and not any(o.lstrip("+~").startswith(key) for o in overrides):  # nobody typed it
            return f"{preset} does not go with the rest: it sets {key}, which is not there; leave out what it chooses"
        parent, _, leaf = key.rpartition(".")
        known = _keys(parent, typed, overrides)
        if parent and not known:
            top = _keys("", typed, [])
            return f"{parent} has no keys" if parent in top else f"there is no section '{parent}'{nearest(parent, top)}"
        if leaf in known:  # the key exists: its value did not fit
            return text.splitlines()[0]
        where = f"{parent} has" if parent else "there are"
        elsewhere = {k: choices for k, choices in _other_keys(parent, typed).items() if k not in known}
        if parent == "ffn" and (own := _own_block(typed)):
            return f"unknown key {key}; a block of one's own has the options that its YAML lists: add {leaf} to {own}"
        having = [choice for choice in elsewhere.get(leaf, []) if choice not in overrides]
        if having:
            return f"unknown key {key} here; it comes with {' or '.join(having)}"
        if not parent and (places := _sections_with(leaf, typed)):
            return f"unknown key {key}; write {' or '.join(places)}"
        more = "; lightning.Trainer's other arguments take a +, as in +trainer.profiler=simple" * (parent == "trainer")
        close = nearest(leaf, [*known, *elsewhere])
        for other, choices in elsewhere.items():
            if close == nearest(other, [other]):
                close = f"{close[:-2]}, which comes with {' or '.join(choices)}?)"
        return f"unknown key {key}{close}; {where} {', '.join(known) or 'no such section'}{more}"
    there = re.search(r"An item is already at '([^']+)'", text)
    if there:
        return f"{there.group(1)} is there already: write {there.group(1)}=..., without +"
    absent = re.search(r"Could not delete from config\. '([^']+)' does not exist", text)
    if absent:  # or it is null, which is the same to Hydra
        parent, _, leaf = absent.group(1).rpartition(".")
        known = _keys(parent, typed, overrides)
        why = f"{absent.group(1)} is null already" if leaf in known else f"there is no such key{nearest(leaf, known)}"
        return f"~{absent.group(1)} takes nothing away: {why}"
    followed = re.search(r"Interpolation key '([^']+)' not found", text)
    if followed:
        key = followed.group(1).removeprefix("hydra.runtime.choices.")
        if any(o.startswith("~") and o[1:].partition("=")[0] == key for o in overrides):
            return f"~{key}: {key} cannot be taken away, other keys follow it; write {key}=..."
        full_key = getattr(error, "full_key", None)
        return f"{full_key or 'the configuration'} follows {followed.group(1)}, which is not there"
    group = re.search(r"Could not find '([^']+)'|No match in the defaults list for '([^']+)'", text)
    if group:
        name = group.group(1) or group.group(2)
        known = _keys("", typed, [])
        return f"there is no group or key '{name}'{nearest(name, known)}"
    if "Config group override must be" in text:
        odd = [
            o for o in overrides if _is_group(o, typed) and re.search(r"=([^A-Za-z_\"']|(null|true|false)$)", o, re.I)
        ]
        return f"{' '.join(odd) or 'an override'} names no choice; python train.py --help lists them"
    if isinstance(error, OverrideParseException):
        return (
            f"cannot read the override {error.override!r}: write key=value, and quote a value with special characters"
        )
    return text.strip().splitlines()[0]


def _keys(parent: str, typed: Typed, overrides: list[str]) -> list[str]:
    """The keys of a section, to suggest from, with the choices among ``overrides`` made."""
    groups = {path.name for folder in typed.folders for path in folder.iterdir() if path.is_dir()}
    chosen = [word for word in overrides if word.partition("=")[0] in groups and "," not in word]
    try:
        cfg: Any = typed.compose(chosen)
        section = OmegaConf.select(cfg, parent) if parent else cfg
        return [str(key) for key in section if key != "hydra"] if isinstance(section, DictConfig) else []
    except (HydraException, OmegaConfBaseException):
        return []


def _sections_with(leaf: str, typed: Typed) -> list[str]:
    """Where a key lies that was typed without its section: ``optim.lr``."""
    sections = _keys("", typed, [])
    return [f"{section}.{leaf}" for section in sections if leaf in _keys(section, typed, typed.overrides)]


def _own_block(typed: Typed) -> Path | None:
    """The YAML of the chosen block, if it is not one of ours."""
    chosen = next((word[4:] for word in reversed(typed.overrides) if word.startswith("ffn=")), "")
    own = [folder / "ffn" / f"{chosen}.yaml" for folder in typed.folders[1:]]
    return next((path for path in own if path.is_file()), None)


def _is_group(override: str, typed: Typed) -> bool:
    key = override.partition("=")[0].lstrip("+")
    return any((folder / key).is_dir() for folder in typed.folders)


def _other_keys(group: str, typed: Typed) -> dict[str, list[str]]:
    """The keys that choices of ``group`` bring along, each with the choices that do, as typed: ``data=text``."""
    files = [path for folder in typed.folders for path in sorted((folder / group).glob("*.yaml")) if group]
    keys: dict[str, list[str]] = {}
    for path in files:
        for key in OmegaConf.load(path) or {}:
            keys.setdefault(str(key), []).append(f"{group}={path.stem}")
    return keys
