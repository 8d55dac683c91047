"""The functions, classes and settings of the libraries are where the pages say."""

import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from text_checks.common import after, read

LIBRARIES = Path(sysconfig.get_path("purelib"))
ZERO_CONFIG = "deepspeed/runtime/zero/config.py"
# Page, what it names, and the file and the line of a library that define it
NAMES = (
    ("ddp.md", "bf16_compress_hook", "torch/distributed/algorithms/ddp_comm_hooks/default_hooks.py", "def {}("),
    ("efficiency.md", "DataCollatorWithFlattening", "transformers/data/data_collator.py", "class {}("),
    ("offload.md", "adamw_8bit", "transformers/training_args.py", '= "{}"'),
    ("offload.md", "adafactor", "transformers/training_args.py", '= "{}"'),
    ("offload.md", "nvme_path", "deepspeed/runtime/zero/offload_config.py", "    {}: "),
    ("zero.md", "zero_quantized_weights", ZERO_CONFIG, "    {}: "),
    ("zero.md", "zero_quantized_gradients", ZERO_CONFIG, "    {}: "),
    ("zero.md", "zero_hpz_partition_size", ZERO_CONFIG, "    {}: "),
    ("deepspeed-config.md", "500 million", ZERO_CONFIG, "reduce_bucket_size: int = Field(pp_int(5e8)"),
)


def findings() -> Iterator[str]:
    yield from functions_of_the_training_loop()
    for page, name, file, line in NAMES:
        if name not in read(f"docs/{page}"):
            yield f"docs/{page}: says nothing of {name}; remove its row from tests/text_checks/libraries.py"
        elif line.format(name) not in read(LIBRARIES / file):
            yield f"docs/{page}: says {name}, {file} has no line {line.format(name)!r}; write what the file says now"


def functions_of_the_training_loop() -> Iterator[str]:
    page = "docs/training-loop.md"
    rows = re.findall(r"^- `([\w/]+\.py)`: (`.*`)$", after(read(page), "Where to read it"), re.MULTILINE)
    if not rows:
        yield f"{page}: lists no function below `## Where to read it`; write - `<file>`: `<function>`"
    for file, functions in rows:
        for function in re.findall(r"`(\w+)`", functions):
            if not re.search(rf"^ *def {function}\(", read(LIBRARIES / file), re.MULTILINE):
                yield f"{page}: says {function} is in {file}, and it is not; write the function that does this now"
