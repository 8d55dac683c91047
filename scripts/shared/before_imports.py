"""What a command does before it imports PyTorch and transformers, because an import reads some variables."""

import os
import re

from shared.errors import ENVIRONMENT, WorkshopError, run_program

GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd")  # files of NVIDIA's and AMD's drivers


def variables_before_imports() -> dict[str, str]:
    """Return the variable with which OpenMP's threads wait in a loop only briefly, and then sleep.

    By default they wait in the loop for milliseconds, and take the cores from other programs and from each other. Next
    to other programs, a run on the CPU is then many times slower (benchmarks/threads.py). Nothing is set on a machine
    with a GPU, or if the user has already chosen how threads wait.

    A malformed HF_ENDPOINT, with which the import of transformers would end in a traceback, ends the process here.
    """
    run_program(check_endpoint)
    has_gpu = os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(map(os.path.exists, GPU_DRIVERS))
    chosen = "GOMP_SPINCOUNT" in os.environ or "OMP_WAIT_POLICY" in os.environ
    return {} if has_gpu or chosen else {"GOMP_SPINCOUNT": "1000"}


def check_endpoint() -> None:
    """Raise WorkshopError (exit code 3) if HF_ENDPOINT is not a web address."""
    endpoint = os.environ.get("HF_ENDPOINT")
    if endpoint and not re.fullmatch(r"https?://(\[\S+\]|[^\s/:]+)(:\d+)?(/\S*)?", endpoint):
        way_out = "give it as https://host or https://host:port, or unset it"
        raise WorkshopError("HF_ENDPOINT", f"{endpoint} is not a web address", way_out, ENVIRONMENT)
