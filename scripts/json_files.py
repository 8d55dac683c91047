"""JSON files: reading one that a user wrote, and replacing one that others read meanwhile."""

import json
import os
from pathlib import Path

from errors import WorkshopError


def read_json(path: str | Path) -> dict:
    """A JSON object from a file. Raises WorkshopError (exit code 2) with line and column when it is not one."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        content = json.loads(text, object_pairs_hook=lambda pairs: without_repeats(path, pairs))
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise WorkshopError(path, f"{where}: {error.msg}", "correct the JSON") from error
    except UnicodeDecodeError as error:
        raise WorkshopError(path, f"byte {error.start} is not UTF-8", "save the file as UTF-8") from error
    except OSError as error:
        what = error.strerror or "cannot be read"
        raise WorkshopError(path, what, "see ds_configs/ and fsdp_configs/") from error
    if not isinstance(content, dict):
        raise WorkshopError(path, "is not a JSON object", "see ds_configs/ and fsdp_configs/ for examples")
    return content


def without_repeats(path: str | Path, pairs: list[tuple[str, object]]) -> dict:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise WorkshopError(f"{path}: {key}", "stands twice in one object", "remove one of them")
    return dict(pairs)


def write_json(path: Path, content: dict) -> None:
    """Replace the file in one step, so that no reader ever sees half of it."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)
