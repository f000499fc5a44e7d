"""AdamW, SGD and Muon on shards, their groups by role, the gradient norm, schedules, averages.

When a step is applied is in train. Imports: config, facts, runtime, models, parallel.
"""
