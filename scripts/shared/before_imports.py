"""Preparation of a command for the imports of PyTorch and transformers, which read some variables only then."""

import os

GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd")  # files of NVIDIA's and AMD's drivers


def prepare_imports() -> None:
    """On a machine without a GPU, let OpenMP's threads wait in a loop only briefly, and then sleep.

    By default they wait in the loop for milliseconds, and take the cores from other programs and from each other. Next
    to other programs, a run on the CPU is then many times slower. Nothing changes if the user has already chosen how
    threads wait.
    """
    without_gpu = os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not any(map(os.path.exists, GPU_DRIVERS))
    if without_gpu and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
