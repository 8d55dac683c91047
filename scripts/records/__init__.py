"""The run record and the memory logs of a job: their format, who writes them, who reads them."""
