"""Runs a step on meta tensors and a fake process group, and counts its memory and messages.

Predicted seconds are in tools/planner.
Imports: config, facts, runtime, models, data, parallel, optim, train, tools/planner, tools/mesh_axes,
tools/torch_names.
"""
