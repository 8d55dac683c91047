# shellcheck shell=bash
# Knobs of this experiment. A value given at submission comes first, then one of the site file.
# A global batch of 64, as 16 GPUs without accumulation would have:
: "${BATCH_SIZE:=4}"
: "${GRAD_ACC:=16}"
# Four times that of 16: 64 / 16
: "${LEARNING_RATE:=$(awk "BEGIN { print 4 * ${SITE_LEARNING_RATE:-5e-5} }")}"
: "${TRAIN_SIZE:=1024}"
: "${NUM_EPOCHS:=3}"
: "${SAVE_STRATEGY:=no}" # this measures training, not the file system
: "${EM_F1:=False}"
