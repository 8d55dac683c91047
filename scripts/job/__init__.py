"""What only experiments/job.sh calls, as `python -m job.NAME`: the job's GPUs, rendezvous, end of the record."""
