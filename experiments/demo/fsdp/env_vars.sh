# shellcheck shell=bash
# Knobs of this experiment. A value given at submission has priority, then the site's value, then the value here.
: "${TRAIN_SIZE:=128}"
: "${EVAL_SIZE:=32}"
: "${EM_F1:=False}"
: "${NUM_EPOCHS:=3}"
: "${BATCH_SIZE:=4}"
: "${GRAD_ACC:=2}" # the global batch is 16
: "${FP16:=False}" # use fp32, so that the losses agree in all printed digits
: "${BF16:=False}"
: "${SAVE_STRATEGY:=no}"
