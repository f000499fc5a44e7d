"""One training step, and one evaluation.

The loop around them is a recipe. Imports: config, runtime, models, data, parallel, optim.
"""
