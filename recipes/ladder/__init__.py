"""Trains several sizes of a model, fits their loss over compute, and predicts the next size.

The laws that choose shape, batch and rate of a size are in tools/planner/search/size.py; jobs are those of the sweep.
Imports: config, facts, tools/resources, tools/planner.
"""
