"""Check that the libraries have the functions, classes and settings that the pages name."""

import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from text_checks.common import read, section_below

LIBRARIES = Path(sysconfig.get_path("purelib"))
ZERO_CONFIG = "deepspeed/runtime/zero/config.py"
# Page, name on the page, and the library file and line that define the name
NAMES = (
    ("ddp.md", "bf16_compress_hook", "torch/distributed/algorithms/ddp_comm_hooks/default_hooks.py", "def {}("),
    ("offload.md", "adamw_8bit", "transformers/training_args.py", '= "{}"'),
    ("offload.md", "adafactor", "transformers/training_args.py", '= "{}"'),
    ("offload.md", "nvme_path", "deepspeed/runtime/zero/offload_config.py", "    {}: "),
    ("zero.md", "zero_quantized_weights", ZERO_CONFIG, "    {}: "),
    ("zero.md", "zero_quantized_gradients", ZERO_CONFIG, "    {}: "),
    ("zero.md", "zero_hpz_partition_size", ZERO_CONFIG, "    {}: "),
    ("deepspeed-config.md", "500 million", ZERO_CONFIG, "reduce_bucket_size: int = Field(pp_int(5e8)"),
)


def training_loop_functions() -> Iterator[tuple[str, str, str, str]]:
    for row in section_below(read("docs/training-loop.md"), "Where to read it").split("\n- ")[1:]:
        file, *functions = re.findall(r"`(.+?)`", row)
        yield from (("training-loop.md", function, file, "def {}(") for function in functions)


def findings() -> Iterator[str]:
    functions = list(training_loop_functions())
    if not functions:
        yield "docs/training-loop.md: lists no functions below `## Where to read it`; write - `<file>`: `<function>`"
    for page, name, file, line in (*NAMES, *functions):
        if name not in read(f"docs/{page}"):
            yield f"docs/{page}: does not name {name}; remove its row from tests/text_checks/libraries.py"
        elif line.format(name) not in read(LIBRARIES / file):
            yield f"docs/{page}: says {name}, {file} has no `{line.format(name)}`; write what the file has now"
