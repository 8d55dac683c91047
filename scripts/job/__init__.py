"""What experiments/job.sh calls, as `python -m job.NAME`: rendezvous, state of git, the end of a job.

Of these the training takes git_state and with_parent, too, and the report is_alive of end_of_job.
"""
