"""Data sets of the Hugging Face hub, through ``datasets``; code from the hub is never run."""

import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ffnlab.data.config import HubData
from ffnlab.data.splits import Document
from ffnlab.errors import UserError

_PATIENCE_S = 10.0


def hub_documents(cfg: HubData, split: str, rows: Iterable[dict[str, Any]]) -> Iterator[Document]:
    """The documents of one split, from its rows; raises UserError when ``text_column`` is not there."""
    for number, text in enumerate(islice(_documents(cfg, rows), cfg.max_documents), start=1):
        yield Document(f"{cfg.repo} {split} {number}", text)


def _documents(cfg: HubData, rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    texts = _texts(rows, cfg)
    if cfg.document_start is None:
        yield from (text for text in texts if text.strip())
        return
    start = re.compile(cfg.document_start)
    lines: list[str] = []
    for line in texts:
        if start.match(line) and lines:
            yield "".join(lines)
            lines = []
        if line.strip() or lines:
            lines.append(line if line.endswith("\n") else line + "\n")
    if lines:
        yield "".join(lines)


def _texts(rows: Iterable[dict[str, Any]], cfg: HubData) -> Iterator[str]:
    for row in rows:
        text = row.get(cfg.text_column)
        if text is None and cfg.text_column not in row:
            raise UserError(
                f"{cfg.repo} has no column {cfg.text_column!r}: set data.text_column to one of {', '.join(row)}"
            )
        if text is None:
            continue
        if not isinstance(text, str):
            raise UserError(f"{cfg.repo}: column {cfg.text_column!r} is not text: set data.text_column")
        yield text


def open_hub(cfg: HubData, split: str) -> Iterable[dict[str, Any]]:
    """The rows of one split; raises UserError within seconds when the hub is out of reach."""
    from datasets import load_dataset
    from datasets.config import HF_ENDPOINT, HF_HUB_OFFLINE

    local = Path(cfg.repo).expanduser().is_dir()
    if not local and not HF_HUB_OFFLINE and not _reachable(HF_ENDPOINT):
        raise UserError(
            f"cannot reach the hub ({HF_ENDPOINT}) for {cfg.repo}: connect to the network, or use "
            "data=shakespeare or data=text. With a copy in the local cache, set HF_HUB_OFFLINE=1"
        )
    try:
        rows: Iterable[dict[str, Any]] = load_dataset(
            cfg.repo,
            cfg.name,
            split=split,
            revision=cfg.revision,
            # a part of a large set: read that part only, rather than download everything first
            streaming=cfg.max_documents is not None,
        )
    except Exception as error:  # whatever datasets, the hub client or the network raise: nothing of ours is in there
        raise UserError(f"cannot load {cfg.repo} (split {split}): {first_line(error)}") from error
    return rows


def first_line(error: BaseException) -> str:
    """What a library's exception says, short enough for a message of ours."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _reachable(endpoint: str) -> bool:
    """Whether the hub answers at all. The hub client itself would retry for minutes."""
    answers: list[bool] = []

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=_PATIENCE_S / 2)
        except urllib.error.HTTPError:
            answers.append(True)  # it answered
        except (OSError, ValueError):
            answers.append(False)
        else:
            answers.append(True)

    # in a thread of its own, since looking up a name has no time limit
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    return answers == [True]
