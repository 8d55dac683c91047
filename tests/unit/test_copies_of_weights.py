"""Tests of the sum that compares copies of a weight."""

import pytest
import torch

from guard.silent_faults import sum_of_bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0, 1, 3, 4, 5])
def test_the_sum_of_bits_changes_with_a_bit_and_not_with_the_place_in_memory(dtype, size):
    buffer = torch.randn(16).to(dtype)
    for start in range(3):  # weights of DeepSpeed lie somewhere in one buffer
        part = buffer[start : start + size]
        expected = int(sum_of_bits(part.clone()))
        assert int(sum_of_bits(part)) == expected
        if size:
            changed = part.clone().view(torch.uint8)
            changed[-1] ^= 1  # the lowest bit of the last octet
            assert int(sum_of_bits(changed.view(dtype))) != expected
    assert int(sum_of_bits(torch.ones(4, 3, dtype=dtype).T)) == int(sum_of_bits(torch.ones(12, dtype=dtype)))
