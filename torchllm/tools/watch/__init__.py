"""Observers of a run beyond its meter: breakdown, slow ranks, trackers, goodput, tasks.

The recipe's own logs are in metrics.
Imports: config, facts, runtime, models, data, parallel, optim, train, metrics, tools/resources, tools/config,
tools/planner, tools/mesh_axes, tools/continue_texts, tools/launch, tools/prepare.
"""
