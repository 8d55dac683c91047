"""Format, writing and reading of the run record, and what it says about the environment of a run."""
