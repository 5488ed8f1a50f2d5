"""The report: a run in one self-contained page."""
