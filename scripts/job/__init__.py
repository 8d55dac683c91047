"""Parts of a job: what runs on each node, the memory logs, and the end of the job.

The training also uses on_node, and the report uses end_of_job and memory_logs.
"""
