"""Mixers that few models have: a model imports only its own.

Those of most models are in the folder above. Imports: config, facts, runtime, models.
"""
