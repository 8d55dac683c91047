# shellcheck shell=bash
# Knobs of this experiment. A value given at submission comes first, then one of the site file.
# A global batch of 256, as 64 GPUs without accumulation would have:
: "${BATCH_SIZE:=4}"
: "${GRAD_ACC:=64}"
: "${LEARNING_RATE:=${SITE_LEARNING_RATE:-5e-5}}"
: "${TRAIN_SIZE:=1024}"
: "${NUM_EPOCHS:=3}"
: "${SAVE_STRATEGY:=no}" # this measures training, not the file system
: "${EM_F1:=False}"
