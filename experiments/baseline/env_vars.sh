# shellcheck shell=bash
# This experiment sets no knobs, so it runs with the defaults of scripts/config.py. A copy sets a knob like this:
# : "${TRAIN_SIZE:=500}"
