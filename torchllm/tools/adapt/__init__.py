"""Changes a run's own config while it trains, and measures layouts for `tune`.

Predictions are in tools/planner.
Imports: config, facts, runtime, models, data, parallel, optim, train, metrics, tools/planner, tools/iterable,
tools/torch_names, tools/watch.
"""
