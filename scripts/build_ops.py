"""Compile the optimizers that DeepSpeed builds on first use; does nothing when they are there.

    python scripts/build_ops.py

job.sh runs it before a DeepSpeed training: g++ takes several GB for a minute or two, which would stand in the memory
log as the training's peak. A build that fails is left to the training, which says why it needs it.
"""

import argparse
import os
import sys
import zlib
from pathlib import Path

from errors import OneLineErrors

# DeepSpeed rebuilds what another environment has compiled into the same folder, under the feet of that one's jobs
EXTENSIONS = Path.home() / ".cache" / "torch_extensions" / f"{zlib.crc32(sys.prefix.encode()):08x}"
OPTIMIZERS = ("fused_adam", "cpu_adam")


def main() -> None:
    OneLineErrors(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or EXTENSIONS)
    if all((folder / name / f"{name}.so").is_file() for name in OPTIMIZERS):
        return  # before anything slow is imported
    print(f"compiling DeepSpeed's optimizers into {folder}: one to three minutes, once", flush=True)
    import distributed  # noqa: F401  PATH and TORCH_EXTENSIONS_DIR as in a training
    from deepspeed.accelerator import get_accelerator

    builders = ["FusedAdamBuilder", "CPUAdamBuilder"]
    if get_accelerator().device_name() == "cpu":
        builders.append("ShareMemCommBuilder")
    for builder in builders:
        get_accelerator().create_op_builder(builder).load(verbose=False)


if __name__ == "__main__":
    main()
