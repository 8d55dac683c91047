"""Programs of experiments/job.sh: where the ranks meet, a node's part of a job, and the end of a job.

The training also uses with_parent, and the report uses is_alive of end_of_job.
"""
