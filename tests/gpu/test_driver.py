"""build_ops.py asks CUDA's driver what GPUs there are; PyTorch, which a training asks, must say the same."""

import pytest
import torch

import build_ops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA GPU here")


def test_the_driver_and_pytorch_name_the_same_gpus():
    capabilities = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    assert build_ops.compute_capabilities() == [f"sm_{major}{minor}" for major, minor in sorted(capabilities)]
