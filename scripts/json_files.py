"""JSON files: reading one that a user wrote, and replacing one that others read meanwhile."""

import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from errors import WorkshopError

DEEPEST = 50  # objects and lists within each other; what walks through a config calls itself for each
EXAMPLES = "see ds_configs/ and fsdp_configs/"


def read_json(path: str | Path, way_out: str = EXAMPLES) -> dict:
    """A JSON object from a file. Raises WorkshopError (exit code 2) with the place of what is wrong with it.

    way_out: what to do about a file that is not there, or holds something else.
    """
    content = parse_json(path, read_bytes(path, way_out), "correct the JSON")
    if not isinstance(content, dict):
        raise WorkshopError(path, "is not a JSON object", way_out)
    for value, depth in leaves(content):
        if depth > DEEPEST:
            raise WorkshopError(path, f"is nested more than {DEEPEST} deep", way_out)
        if isinstance(value, str) and not is_unicode(value):
            raise WorkshopError(path, f"{value!a:.60} is half of a character", "correct the \\u escape")
    return content


def read_bytes(path: str | Path, way_out: str) -> bytes:
    """What a file holds. Only a regular file is opened: one could wait for ever for a pipe, and never end a device."""
    path = os.path.expanduser(path)
    try:
        kind = os.stat(path).st_mode
        if stat.S_ISDIR(kind):
            raise WorkshopError(path, "is a folder", way_out)
        if not stat.S_ISREG(kind):
            raise WorkshopError(path, "is no regular file", way_out)
        return Path(path).read_bytes()
    except OSError as error:
        raise WorkshopError(path, error.strerror or "cannot be read", way_out) from error
    except ValueError as error:  # a name with a null character, which JSON can hold
        raise WorkshopError(path, str(error), way_out) from error


def parse_json(path: str | Path, raw: bytes, way_out: str) -> object:
    """The content of a JSON file or text. Raises WorkshopError (exit code 2) with line and column of the mistake."""
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=lambda pairs: without_repeats(path, pairs))
    except UnicodeDecodeError as error:
        raise WorkshopError(path, f"byte {error.start} is not UTF-8", "save it as UTF-8 (iconv -t UTF-8)") from error
    except json.JSONDecodeError as error:
        raise WorkshopError(path, f"line {error.lineno}, column {error.colno}: {error.msg}", way_out) from error
    except RecursionError as error:
        raise WorkshopError(path, "is nested too deeply", way_out) from error
    except ValueError as error:  # Python reads whole numbers of up to 4300 digits
        raise WorkshopError(path, "holds a number of thousands of digits", way_out) from error


def without_repeats(path: str | Path, pairs: list[tuple[str, object]]) -> dict:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise WorkshopError(f"{path}: {twice}", "stands twice in one object", "remove one of them")
    return content


def leaves(content: dict) -> Iterator[tuple[object, int]]:
    """Every key and value of an object and what lies in it, with its depth."""
    waiting: list[tuple[object, int]] = [(content, 1)]
    while waiting:
        value, depth = waiting.pop()
        yield value, depth
        if isinstance(value, dict):
            value = [*value, *value.values()]
        if isinstance(value, list):
            waiting += [(each, depth + 1) for each in value]


def is_unicode(text: str) -> bool:
    """Whether it can be written as UTF-8: no half of a surrogate pair, which JSON's \\u and a shell can give."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def write_json(path: Path, content: dict) -> None:
    """Replace the file in one step, so that no reader ever sees half of it.

    JSON knows no NaN and no infinity: such a value becomes null, and `missing` says so under its name.
    """
    reasons: dict[str, str] = {}
    content = {key: finite(value, key, reasons) for key, value in content.items()}
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


def finite(value: object, name: str, reasons: dict[str, str]) -> object:
    """The value with None for each number in it that is not finite; `reasons` gets the names of those."""
    if isinstance(value, float) and not math.isfinite(value):
        reasons[name] = f"it was {value}"
        return None
    if isinstance(value, dict):
        return {key: finite(part, f"{name}.{key}", reasons) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part, f"{name}.{i}", reasons) for i, part in enumerate(value)]
    return value
