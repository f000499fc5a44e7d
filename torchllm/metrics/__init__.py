"""The meter of a run, its observers, and the files and lines that it writes.

Profiles, trackers and reports are in tools/watch. Imports: config, facts, runtime, models, data, parallel, optim,
train, checkpoint.
"""
