"""The proof that every layout trains the same model: what `recipes/prove.py` and the project's own tests stand on.

layouts     every combination of settings that a config allows on so many ranks
sample      draws a few of them in which every pair of settings occurs
pool        live ranks on this machine
record      runs a recipe's `train` on them and records losses, gradients and weights
compare     compares two such trainings, parameter by parameter
shrink      makes a user's config small enough for that
axes        what each setting does, and what to look at where it is wrong
recipe      finds the recipe of a fork, and its config
prove       all of it, for one config
report      says what was found

Imports: config, facts, runtime, models, data, parallel, train, checkpoint, metrics, tools/config, tools/launch,
tools/dry_run, tools/watch, tools/adapt.
"""
