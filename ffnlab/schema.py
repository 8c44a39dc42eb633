"""The types that configuration is held against, and the one place where a violation becomes a readable message.

Sections are dataclasses; pydantic checks them strictly (a string is no number, true is no integer, an unknown key is an
error), so no section parses or range-checks by hand.
"""

import difflib
import json
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from ffnlab.errors import UserError

STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True)

PositiveInt = Annotated[int, Field(gt=0, lt=2**53)]
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**53)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]

T = TypeVar("T")


def validate(kind: type[T], values: dict[str, Any], where: str = "") -> T:
    """Build ``kind`` from plain values.

    Raises:
        UserError: one line for each violation, by its dotted key.
    """
    try:
        # JSON mode: strict about scalars, yet willing to make a dataclass of a mapping.
        return TypeAdapter(kind).validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        raise UserError("\n".join(dict.fromkeys(_line(e, where, kind) for e in error.errors()))) from None
    except TypeError as error:
        raise UserError(f"{where or 'the configuration'} holds a value that is no plain data: {error}") from None


def nearest(word: str, choices: list[str]) -> str:
    """`` (did you mean X?)`` for the most similar choice, or nothing."""
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def _line(error: Any, where: str, kind: Any) -> str:
    # pydantic puts a tagged union's tag into the location; it is no key a person typed.
    path = [str(part) for part in error["loc"]]
    key = ".".join(([where] if where else []) + path)
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        fields = list(getattr(kind, "__dataclass_fields__", {})) if len(path) == 1 else []
        return f"unknown key {key}{nearest(path[-1], fields)}"
    if error["type"] in ("missing", "missing_argument"):
        return f"{key} is missing"
    message = error["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return f"{key} {message}, not {error['input']!r}"
