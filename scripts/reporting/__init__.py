"""The parts of report.py. They read runs and their logs, and write tables, plots and pages."""
