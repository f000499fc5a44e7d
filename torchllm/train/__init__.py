"""One training step, and one evaluation.

The loop around them is a recipe. Imports: config, facts, runtime, models, data, parallel, optim.
"""
