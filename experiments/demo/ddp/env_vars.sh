# shellcheck shell=bash
# Knobs of this experiment. A value given at submission comes first, then one of the site file.
: "${NUM_EPOCHS:=3}"
: "${BATCH_SIZE:=4}"
: "${GRAD_ACC:=2}" # global batch of 16
: "${TRAIN_SIZE:=128}"
: "${EVAL_SIZE:=32}"
: "${LABELS:=sequence}"
: "${FP16:=False}" # fp32: the losses agree in all digits that are shown
: "${BF16:=False}"
: "${SAVE_STRATEGY:=no}"
: "${EM_F1:=False}"
