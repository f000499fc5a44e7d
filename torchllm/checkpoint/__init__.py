"""Saves and loads the state of a run, on any layout, and decides which checkpoints are good and stay.

Weights in the formats of others are in tools/hub. Imports: config, facts, runtime, parallel, optim, train.
"""
