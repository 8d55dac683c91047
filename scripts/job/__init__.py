"""Programs that experiments/job.sh runs: the master address, a node's part of a job, and the end of a job.

The training also uses end_with_parent, and the report uses is_alive from end_of_job.
"""
