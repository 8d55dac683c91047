#!/usr/bin/env bash
# The baseline on this machine: tiny-bloom, the bundled sample, 3 epochs, then its summary table.
#     make demo
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# tiny-bloom starts from random weights, so it needs larger steps than a pretrained model
export MODEL_NAME=tiny-bloom DATASET=data/squad_sample.json TRAIN_SIZE=256 EVAL_SIZE=64 LEARNING_RATE=2e-3
export PADDING=longest EXPERIMENT_NAME=demo
JOB_ID=demo-$(date +%Y%m%d-%H%M%S)
export JOB_ID
python scripts/train.py
python scripts/report.py --job "results/$JOB_ID.json"
