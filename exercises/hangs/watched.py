"""Run another script under the watchdog of train.py, which ends the script when no rank has made progress for 15 s.

OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 exercises/hangs/watched.py exercises/hangs/skipped.py
"""

import runpy
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
from distributed import watchdog

watchdog.start(15)
watchdog.progress(sys.argv[1])
runpy.run_path(sys.argv[1], run_name="__main__")
