"""Measures on a GPU: a step beside other programs' and a bare loop, matrix products, checkpoints; and the first hour.

What is measured is in the library. Imports: config, facts, runtime, models, data, parallel, checkpoint, metrics,
tools/resources, tools/config, tools/launch, tools/adapt, tools/front.
"""
