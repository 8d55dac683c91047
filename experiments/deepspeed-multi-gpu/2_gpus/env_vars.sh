# shellcheck shell=bash
# Knobs of this experiment. A value given at submission has priority, then the site's value, then the value here.
: "${SAMPLES_PER_GPU:=${SITE_SAMPLES_PER_GPU:-250}}" # weak scaling: the number of questions grows with the GPUs
: "${EM_F1:=False}"
: "${SAVE_STRATEGY:=no}" # measure the training, not the file system
