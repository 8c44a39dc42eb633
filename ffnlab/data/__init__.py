"""Text corpora as token files, batches that depend on nothing but (data_seed, step), and the copy task.

The configuration dataclasses are plain and cheap to import; whatever needs torch, ``datasets`` or
``tokenizers`` is loaded when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ffnlab.data.config import CopyData, HubData, ShakespeareData, TextData, TokenizerConfig

if TYPE_CHECKING:
    from ffnlab.data.batches import val_windows, windows
    from ffnlab.data.copy_task import CopyTask
    from ffnlab.data.preparation import Data, prepare
    from ffnlab.data.token_files import TextTokens

__all__ = [
    "CopyData",
    "CopyTask",
    "Data",
    "HubData",
    "ShakespeareData",
    "TextData",
    "TextTokens",
    "TokenizerConfig",
    "prepare",
    "val_windows",
    "windows",
]

_HOME = {
    "CopyTask": "copy_task",
    "Data": "preparation",
    "TextTokens": "token_files",
    "prepare": "preparation",
    "val_windows": "batches",
    "windows": "batches",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
