"""Verbs of the command line that belong to no other part: `info`, `check`, `explain`."""
