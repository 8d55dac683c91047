# shellcheck shell=bash
# Knobs of this experiment. A value given at submission has priority, then the site's value, then the value here.
: "${LOSS:=chunked}"
: "${ATTENTION:=sdpa}"
: "${PADDING:=longest}"
: "${EM_F1:=False}"
: "${BF16:=True}"
: "${SAMPLING:=group_by_length}"
: "${SAVE_STRATEGY:=no}" # measure the training, not the file system
