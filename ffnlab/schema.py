"""The types that configuration is held against, and the one place where a violation becomes a readable message.

Sections are dataclasses; pydantic checks them strictly (a string is no number, true is no integer, an unknown key is an
error), so no section parses or range-checks by hand.
"""

import difflib
import functools
import json
import re
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from ffnlab.errors import UserError

STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True)


def _whole(value: Any) -> Any:
    """``1e5`` is how people write 100,000, and YAML reads it as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


PositiveInt = Annotated[int, BeforeValidator(_whole), Field(gt=0, lt=2**53)]
NonNegativeInt = Annotated[int, BeforeValidator(_whole), Field(ge=0, lt=2**53)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]

LONGEST = 80  # characters of a wrong value in a message

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


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)  # takes a millisecond to make, and a study has hundreds of records


def first_violation(kind: Any, values: Any, within: tuple[str, ...] = ()) -> str:
    """What about ``values`` does not fit ``kind`` first, by its dotted key below ``within``; empty if nothing."""
    try:
        _adapter(kind).validate_python(values, strict=True)
    except ValidationError as error:
        return _line(error.errors()[0], ".".join(within), kind)
    return ""


def nearest(word: str, choices: list[str]) -> str:
    """`` (did you mean X?)`` for the most similar choice, or nothing."""
    by_lower = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.5)
    return f" (did you mean {by_lower[close[0]]}?)" if close else ""


def _line(error: Any, where: str, kind: Any) -> str:
    # pydantic puts a tagged union's tag into the location; it is no key a person typed.
    path = [str(part) for part in error["loc"]]
    key = ".".join(([where] if where else []) + path)
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        fields = list(getattr(kind, "__dataclass_fields__", {})) if len(path) == 1 else []
        return f"unknown key {key}{nearest(path[-1], fields)}"
    if error["type"] in ("missing", "missing_argument"):
        return f"{key} is missing"
    if error["type"].startswith("int_"):
        example = ", such as 1_500_000 or 1.5e6" if re.fullmatch(r"[\d.,_]+ ?[kKmMgGbB]", str(error["input"])) else ""
        return f"{key} must be a whole number{example}, not {_shown(error['input'])}"
    if error["type"] == "string_pattern_mismatch":
        return f"{key} must be a name of letters, digits, '_', '.' and '-', not {_shown(error['input'])}"
    message = error["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return f"{key} {message}, not {_shown(error['input'])}".strip()


def _shown(value: Any) -> str:
    """A value as it would be typed, cut short: a wrong one may be a whole file."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
