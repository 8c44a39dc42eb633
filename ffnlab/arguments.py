"""The words of a command line, before Hydra reads them: what a person in a hurry types instead of ``key=value``."""

import argparse
import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser

from ffnlab.call import CONF, NUMBER, quoted
from ffnlab.errors import UserError

LISTED = 8  # seeds that are spelt out; more are a range
SEVERAL = ("ffn", "seed", "init_seed", "data_seed")  # what a study has several of
NAMES = ("resume", "hydra.run.dir", "hydra.sweep.dir")  # beside those that a run's configuration has
SPAN = re.compile(r"(\d{1,6})(?:\.\.\.?|-|:)(\d{1,6})")


def read_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Hydra's options and the overrides among ``words``.

    Raises:
        UserError: an option that is none, or none here; an override that cannot be meant as it is written.
    """
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise UserError(_no_option(message, words))

    parser.error = refuse  # type: ignore[method-assign]
    args = parser.parse_intermixed_args(list(words))  # ffn=relu,gelu -m seed=0,1
    if args.config_name or args.config_path:
        option = "--config-name" if args.config_name else "--config-path"
        raise UserError(
            f"{option} is not used here: a run starts from conf/train.yaml; give a folder of your own choices "
            "(FOLDER/ffn/mine.yaml, FOLDER/experiment/mine.yaml) with --config-dir FOLDER"
        )
    given = {"-m": args.multirun, "--cfg": args.cfg, "--info": args.info, "--shell-completion": args.shell_completion}
    modes = [option for option, value in given.items() if value]
    if len(modes) > 1:
        raise UserError(f"{' and '.join(modes)} do not go together: leave out all but one")
    if args.experimental_rerun:
        raise UserError("--experimental-rerun is not used here: go on with a run by resume=RUN_DIR")
    if args.shell_completion:
        if not re.fullmatch(r"(install|uninstall|query)=(bash|zsh|fish)", " ".join(args.overrides)):
            raise UserError(
                '--shell-completion takes install=bash (zsh, fish): eval "$(python train.py -sc install=bash)"'
            )
        return args
    _check_overrides(args.overrides, bool(args.multirun))
    return args


def _no_option(message: str, words: Sequence[str]) -> str:
    """``--ffn swiglu`` is how other programs take it."""
    unknown = message.partition("unrecognized arguments: ")[2].split()
    if not unknown:
        return message
    option, equals, value = unknown[0].partition("=")
    after = words[words.index(unknown[0]) + 1 :] if unknown[0] in words else []
    if not equals:
        value = after[0] if after and "=" not in after[0] and not after[0].startswith("-") else "..."
    key = option.lstrip("-").replace("-", "_")
    return f"{option} is no option: keys have no dashes, write {key}={value}"


def _check_overrides(overrides: Sequence[str], several: bool) -> None:
    given: dict[str, str] = {}
    for word in overrides:
        key, equals, value = word.partition("=")
        if not key:
            raise UserError(f"{word} names no key: write key=value, without spaces around =")
        if not equals and not word.startswith("~"):
            raise UserError(f"{word!r} is no key=value{_meant(word)}")
        key = key.lstrip("+")
        if key in SEVERAL and (wanted := _several(value)):
            raise UserError(f"{word} is no list of values: write {'' if several else '-m '}{key}={wanted}")
        if value.endswith(".yaml") and (CONF / key).is_dir():
            raise UserError(f"{word} names a file: write {key}={PurePath(value).stem}")
        if (
            key in SEVERAL and key in given
        ):  # of other keys the last word counts: `$BASE train.tokens=1e5` is how to vary
            both = f"{given[key]},{value}" if "," not in given[key] + value else f"{key}=A,B"
            raise UserError(f"{key} is given twice: leave one out, or for several runs write -m {both}")
        given[key] = word


def _meant(word: str) -> str:
    """The override that a bare word may stand for."""
    for group in sorted(path.name for path in CONF.iterdir() if path.is_dir()):
        if word == group:
            return f": write {group}=CHOICE, without spaces around ="
        if (CONF / group / f"{word}.yaml").is_file():
            return f": write {group}={word}, or for several -m {group}={word},OTHER"
    return ": quote a value with spaces or special characters" if re.search(r"[^\w.-]", word) else ""


def _several(value: str) -> str:
    """``0..3``, ``0-3`` and ``[0,1,2]`` as Hydra writes them; empty for what is no such thing."""
    if span := SPAN.fullmatch(value):
        first, last = int(span[1]), int(span[2])
        if first < last < first + LISTED:
            return ",".join(map(str, range(first, last + 1)))
        return f"'range({first},{last + 1})'" if first < last else ""
    inside = re.fullmatch(r"\[([\w.,\s-]+)\]", value)
    return re.sub(r"\s", "", inside[1]) if inside else ""


def contiguous(words: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """The same words with the overrides together and names as names, as Hydra's own reading of them needs."""
    options = list(words)
    for override in overrides:
        options.remove(override)
    return [*as_names(overrides), *options]


def as_names(overrides: Sequence[str]) -> list[str]:
    """The same overrides, with numbers quoted where a name is asked for: ``study=1e5`` is the study called ``1e5``.

    Here and not once they are read: a number no longer knows how it was written.
    """
    return [_as_names(word) for word in overrides]


def _as_names(word: str) -> str:
    from ffnlab.run_config import text_keys

    key, equals, value = word.partition("=")
    bare = key.lstrip("+")
    if not bare or not (bare in text_keys() or bare in NAMES or (CONF / bare).is_dir()):
        return word
    parts = re.split(r"([,\[\]])", value)
    if not all(re.fullmatch(r"[\w/.+-]*|[,\[\]]", part) for part in parts):
        return word  # has quotes or functions of its own
    return key + equals + "".join(quoted(part) if NUMBER.fullmatch(part) else part for part in parts)


def wants_text(args: Any) -> bool:
    """Whether the command only prints something: help, a configuration."""
    return bool(args.help or args.hydra_help or args.cfg or args.info or args.shell_completion)
