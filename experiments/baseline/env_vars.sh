# shellcheck shell=bash
# Knobs of this experiment: it sets none, so it runs with the defaults of scripts/config.py. A copy of it sets one like this:
# : "${TRAIN_SIZE:=500}"
