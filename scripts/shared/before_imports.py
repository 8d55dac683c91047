"""Preparation of a command for the imports of PyTorch and transformers, which read some variables only then."""

import os
import re

from shared.errors import ENVIRONMENT, WorkshopError, run_program

GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd")  # files of NVIDIA's and AMD's drivers


def prepare_imports() -> None:
    """On a machine without a GPU, let OpenMP's threads wait in a loop only briefly, and then sleep.

    By default they wait in the loop for milliseconds, and take the cores from other programs and from each other. Next
    to other programs, a run on the CPU is then many times slower (benchmarks/threads.py). Nothing changes if the user
    has already chosen how threads wait. A malformed HF_ENDPOINT ends the process with one error line.
    """
    run_program(check_endpoint)
    without_gpu = os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not any(map(os.path.exists, GPU_DRIVERS))
    if without_gpu and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def check_endpoint() -> None:
    """Raise WorkshopError (exit code 3) for an address of the Hub with which transformers could not be imported."""
    endpoint = os.environ.get("HF_ENDPOINT")
    if endpoint and not re.fullmatch(r"https?://(\[\S+\]|[^\s/:]+)(:\d+)?(/\S*)?", endpoint):
        what = f"{endpoint} is not a web address"
        raise WorkshopError("HF_ENDPOINT", what, "give it as https://host or https://host:port", ENVIRONMENT)
