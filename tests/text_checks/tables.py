"""Compare the tables of the pages with the knobs and with the config files of DeepSpeed and FSDP."""

import json
import re
from collections.abc import Callable, Iterator
from itertools import chain

from config import KNOBS
from helpers import REPOSITORY
from text_checks.common import differences, read

# Words in a row of docs/fsdp.md -> function that returns a true value if the words describe a config
FSDP_WORDS: dict[str, Callable[[dict], object]] = {
    "HYBRID_SHARD": lambda config: "dp_shard_size" in config,
    "of FSDP1": lambda config: config.get("version") == 1,
    "stay gathered": lambda config: config.get("reshard_after_forward") is False,
    "computed again": lambda config: config.get("activation_checkpointing"),
    "CPU memory": lambda config: config.get("cpu_offload"),
    "all ranks": lambda config: "dp_shard_size" not in config,
}


def findings() -> Iterator[str]:
    return chain(knobs(), deepspeed_files(), fsdp_files())


def knobs() -> Iterator[str]:
    rows = re.findall(r"^\| `([A-Z_0-9]+)` \| `(--\w+)` \| (`[^`]*`|.*)", read("docs/knobs.md"), re.MULTILINE)
    shown = {f"{variable} {flag}": default for variable, flag, default in rows}
    stated = {}
    for knob in KNOBS:
        name = f"{knob.variable} --{knob.flag}"
        # The page describes a default of None in words
        stated[name] = shown.get(name, "its meaning") if knob.default is None else f"`{knob.default}`"
    yield from differences("docs/knobs.md", "scripts/config.py", shown, stated)
    if shown.keys() == stated.keys() and [*shown] != [*stated]:
        yield "docs/knobs.md: has its knobs in another order than scripts/config.py; move the rows"


def configs(folder: str) -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text()) for path in (REPOSITORY / folder).glob("*.json")}


def deepspeed_files() -> Iterator[str]:
    """Compare the stages, offload settings and pinned memory on the page with the config files."""
    pattern = r"^\| `(\w+)\.json` \| (\d) \| *([^|;]*?) *(?:;[^|]*)?\| *([^|]*?) *\|$"
    rows = re.findall(pattern, read("docs/deepspeed-config.md"), re.MULTILINE)
    shown = {name: zero_facts(*columns) for name, *columns in rows}
    stated = {}
    for name, config in configs("ds_configs").items():
        zero = config["zero_optimization"]
        parts = {"optimizer": zero.get("offload_optimizer"), "parameters": zero.get("offload_param")}
        pins = ["yes" if section["pin_memory"] else "no" for section in parts.values() if section]
        offload = ", ".join(part for part, section in parts.items() if section)
        stated[name] = zero_facts(zero["stage"], offload, "".join(pins[:1]))
    yield from differences("docs/deepspeed-config.md", "ds_configs/", shown, stated)


def zero_facts(stage: int | str, offload: str, pinned: str) -> str:
    return f"stage {stage}, offload: {offload or '-'}, pinned: {pinned or '-'}"


def fsdp_files() -> Iterator[str]:
    rows = re.findall(r"^\| `(\w+)\.json` (\|.*\|.*\|.*\|)$", read("docs/fsdp.md"), re.MULTILINE)
    shown = {name: ", ".join(words for words in FSDP_WORDS if words in row) for name, row in rows}
    stated = {
        name: ", ".join(words for words, hold in FSDP_WORDS.items() if hold(config))
        for name, config in configs("fsdp_configs").items()
    }
    yield from differences("docs/fsdp.md", "fsdp_configs/", shown, stated)
