"""JSON files: reading one that a user wrote, and replacing one that others read meanwhile."""

import json
import math
import os
from pathlib import Path

from errors import WorkshopError

EXAMPLES = "see ds_configs/ and fsdp_configs/"


def read_json(path: str | Path, way_out: str = EXAMPLES) -> dict:
    """A JSON object from a file. Raises WorkshopError (exit code 2) with the place of what is wrong with it.

    way_out: what to do about a file that is not there, or holds something else.
    """
    content = parse_json(path, read_bytes(path, way_out), "correct the JSON")
    if not isinstance(content, dict):
        raise WorkshopError(path, "is not a JSON object", way_out)
    return content


def read_bytes(path: str | Path, way_out: str) -> bytes:
    """What a file holds; `~` is the home directory. Raises WorkshopError (exit code 2) for one that cannot be read."""
    try:
        return Path(os.path.expanduser(path)).read_bytes()
    except OSError as error:
        raise WorkshopError(path, error.strerror or "cannot be read", way_out) from error


def parse_json(path: str | Path, raw: bytes, way_out: str) -> object:
    """The content of a JSON file. Raises WorkshopError (exit code 2) with line and column of the mistake."""
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise WorkshopError(path, f"byte {error.start} is not UTF-8", "save it as UTF-8 (iconv -t UTF-8)") from error
    except json.JSONDecodeError as error:
        raise WorkshopError(path, f"line {error.lineno}, column {error.colno}: {error.msg}", way_out) from error


def write_json(path: Path, content: dict) -> None:
    """Replace the file in one step, so that no reader ever sees half of it.

    JSON knows no NaN and no infinity: such a value becomes null, and `missing` says so under its name.
    """
    reasons: dict[str, str] = {}
    content = {key: finite_or_null(value, key, reasons) for key, value in content.items()}
    if reasons:
        content["missing"] = content.get("missing", {}) | reasons
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError:  # no space left: not one more file that is empty
        temporary.unlink(missing_ok=True)
        raise


def finite_or_null(value: object, name: str, reasons: dict[str, str]) -> object:
    """The value with None for each number in it that is not finite; `reasons` gets the names of those."""
    if isinstance(value, float) and not math.isfinite(value):
        reasons[name] = f"it was {value}"
        return None
    if isinstance(value, dict):
        return {key: finite_or_null(part, f"{name}.{key}", reasons) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_null(part, f"{name}.{i}", reasons) for i, part in enumerate(value)]
    return value
