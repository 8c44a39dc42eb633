"""The census again: on a trained network, with any N and any text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from ffnlab.census.callback import FirstTokens, ValidationData, count_network
from ffnlab.census.layer_table import layer_table
from ffnlab.errors import UserError


def other_text(data: Any, files: Sequence[str | Path]) -> ValidationData:
    """Put text files in the place of a run's validation set, in the tokens the run was trained on.

    Raises:
        UserError: the run has no tokenizer (the copy task), or the files cannot be read or hold no text.
    """
    if not hasattr(data, "tokenizer"):
        raise UserError("this run was not trained on text, so it has no tokenizer to read other files with")
    ids: list[int] = []
    for file in files:
        try:
            ids += data.tokenizer.encode(Path(file).read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{file} is not UTF-8 text") from error
    if len(ids) < 2:
        raise UserError("the files hold less than two tokens: there is nothing to count")
    return dataclasses.replace(data, val=np.array(ids, dtype=np.uint32))


def rerun_table(network: Any, data: ValidationData, n: int, files: Sequence[str | Path] = (), title: str = "") -> Table:
    """Take the census of a trained network on `n` tokens of its validation set, or of `files`.

    Raises `UserError` for files that cannot be read and for `n` below 1.
    """
    tokens = other_text(data, files) if files else data
    result = count_network(network, FirstTokens(tokens, 8, n), n, updated=True)
    table = layer_table(result, title)
    if result.n < n:
        where = "the files have" if files else "the validation set has"
        table.caption = f"{n:,} tokens were asked for; {where} {result.n:,}.\n{table.caption}"
    return table
