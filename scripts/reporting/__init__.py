"""The parts of report.py: runs and their logs in, tables, plots and pages out."""
