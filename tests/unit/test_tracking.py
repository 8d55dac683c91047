"""Trackers: what is missing is said, and the key of Weights & Biases is never shown."""

import importlib.util

import torch

import tracking
from helpers import REPOSITORY
from training.callbacks import UtilisationCallback


def test_unknown_tracker(refusal):
    assert "choose one of wandb, tensorboard, trackio, none" in refusal(tracking.check_trackers, "wandbb")


def test_missing_tracker_says_how_to_install_it(monkeypatch, refusal):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    assert tracking.check_trackers("none") == []
    line = refusal(tracking.check_trackers, "wandb")
    assert line == "error: --report_to: wandb is not installed; pip install wandb"


def test_the_key_file_is_ignored_by_git():
    assert "experiments/wandb_key" in (REPOSITORY / ".gitignore").read_text().splitlines()


def test_utilisation_of_a_gpu_has_the_documents_names(monkeypatch):
    """A GPU in name only: the numbers that PyTorch would give, through the callback to its means."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    utilisations = iter([40, 60])
    monkeypatch.setattr(torch.cuda, "utilization", lambda: next(utilisations))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 3 * 2**20)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 4 * 2**20)
    properties = type("Properties", (), {"total_memory": 32 * 2**20})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    callback = UtilisationCallback()
    for _ in range(2):
        callback.on_step_end(None, None, None)
    assert callback.means() == {
        "avg_gpu_util_%": 50,
        "std_gpu_util_%": 10,
        "avg_mem_alloc_MB": 3,
        "avg_mem_reserved_MB": 4,
        "avg_mem_total_MB": 32,
    }


def test_gpu_that_does_not_tell_its_utilisation_leaves_it_empty_with_the_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def unknown():
        raise RuntimeError("Not Supported")

    monkeypatch.setattr(torch.cuda, "utilization", unknown)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: type("P", (), {"total_memory": 0}))
    callback = UtilisationCallback()
    callback.on_step_end(None, None, None)
    assert callback.means()["avg_gpu_util_%"] is None
    assert callback.reason == "Not Supported"
