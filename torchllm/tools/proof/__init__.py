"""The proof that every layout trains the same model: used by `recipes/prove.py` and by the project's own tests.

layouts     every combination of settings that a config allows on a number of ranks
sample      draws a few of them that cover every pair of settings
pool        live ranks on this machine
record      runs a recipe's `train` on them and records losses, gradients and weights
compare     compares two such trainings, parameter by parameter
shrink      makes a user's config small enough for that
axes        the effect of each setting, and where to look if it is wrong
recipe      finds the recipe of a fork, and its config
prove       all of it for one config
report      describes the findings

Imports: config, facts, runtime, models, data, parallel, train, checkpoint, metrics, tools/config, tools/launch,
tools/dry_run, tools/watch, tools/adapt.
"""
