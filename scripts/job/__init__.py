"""Parts of a job: the master address, a node's part, the ranks' CPUs, the memory logs, and the end of the job.

The training also uses end_with_parent. The report uses end_of_job and memory_logs.
"""
