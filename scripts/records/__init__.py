"""Format, writing and reading of the run record, and reading of a job's memory logs."""
