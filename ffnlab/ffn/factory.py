"""From a configuration node to a block: any importable class that keeps the contract, ours or a user's."""

import importlib
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

BlockFactory = Callable[[int, int], nn.Module]


def locate(target: str) -> type[nn.Module]:
    """Import the class that ``target`` names, e.g. ``ffnlab.ffn.GatedFFN``.

    Raises:
        ValueError: the module does not import, has no such class, or it is no ``nn.Module``.
    """
    module_name, _, class_name = target.rpartition(".")
    if not module_name:
        raise ValueError(f"_target_ '{target}' must be a dotted path, package.module.ClassName")
    try:
        module = importlib.import_module(module_name)
        cls = getattr(module, class_name)
    except ImportError as error:
        raise ValueError(
            f"_target_ '{target}' cannot be imported: {error}. Is its folder on PYTHONPATH, or the current directory?"
        ) from error
    except AttributeError:
        raise ValueError(
            f"_target_ '{target}': {getattr(module, '__file__', None) or module_name} has no {class_name}. If that is "
            "not the file you mean, put the folder of yours on PYTHONPATH"
        ) from None
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ValueError(f"_target_ '{target}' must be a torch.nn.Module class")
    return cls


def _fits(value: Any, annotation: Any) -> bool:
    """Whether a YAML value may stand where ``annotation`` is asked for (an int is a fine float; a bool is no int)."""
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return value in typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, choice) for choice in typing.get_args(annotation))
    if annotation is type(None):
        return value is None
    if annotation is bool:
        return isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if annotation is str:
        return isinstance(value, str)
    return True


def check_options(cls: type[nn.Module], options: Mapping[str, Any]) -> None:
    """Hold ``options`` against the constructor's own signature, so that no block needs a schema of its own.

    Raises:
        ValueError: an option the constructor does not take, one it needs, or a value of the wrong type.
    """
    parameters = inspect.signature(cls).parameters
    names = list(parameters)
    if names[:2] != ["d_model", "d_ff"]:
        raise ValueError(
            f"{cls.__name__} must be built as {cls.__name__}(d_model, d_ff, ...), not ({', '.join(names)})"
        )
    try:
        hints = typing.get_type_hints(cls.__init__)
    except NameError:  # names that are there for a type checker alone
        hints = {}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name, value in options.items():
        if name in ("d_model", "d_ff") or (name not in parameters and not takes_any):
            known = ", ".join(names[2:]) or "none"
            raise ValueError(f"{cls.__name__} has no option '{name}' (options: {known})")
        if name in hints and not _fits(value, hints[name]):
            wanted = getattr(hints[name], "__name__", str(hints[name]))
            raise ValueError(f"ffn.{name} must be of type {wanted}, not {value!r}")
    for name in names[2:]:
        parameter = parameters[name]
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.default is parameter.empty and name not in options:
            raise ValueError(f"{cls.__name__} needs the option '{name}': give it in the block's YAML")


def make_block(target: str, options: Mapping[str, Any]) -> BlockFactory:
    """Return ``factory(d_model, d_ff) -> nn.Module`` for the class ``target`` with ``options`` filled in.

    Raises:
        ValueError: see ``locate`` and ``check_options``.
    """
    cls = locate(target)
    check_options(cls, options)
    return partial(cls, **options)
