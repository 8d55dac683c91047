# shellcheck shell=bash
# The site of a practice cluster, which make cluster starts on one machine: the profile of a laptop, in real Slurm jobs.
# The shell of the practice cluster sets SITE=practice.

# shellcheck source=experiments/sites/laptop.sh
source "$EXPERIMENTS_FOLDER/sites/laptop.sh"
: "${OMP_NUM_THREADS:=1}" # all nodes share the cores of one machine
: "${MIN_BANDWIDTH:=0}"   # the nodes have no real network to measure
