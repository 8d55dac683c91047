"""Trackers that are unknown or missing. What they hold: tests/integration/test_trackers.py, test_callbacks.py."""

import importlib.util

import tracking
from helpers import REPOSITORY


def test_a_tracker_that_is_unknown_or_missing_says_what_to_do(monkeypatch, refusal):
    assert "choose one of wandb, tensorboard, trackio, none" in refusal(tracking.check_trackers, "wandbb")
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    line = refusal(tracking.check_trackers, "wandb")
    assert line == "error: --report_to: wandb is not installed; pip install wandb"


def test_the_key_file_is_ignored_by_git():
    assert "experiments/wandb_key" in (REPOSITORY / ".gitignore").read_text().splitlines()
