"""Faults that happen to real jobs: one file per kind; `--trials=N` repeats each."""
