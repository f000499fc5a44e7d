"""Mixers and feed-forward layers that few models have; a model imports only its own.

Those of most models are in models itself, and what all of them declare in facts/parts. Imports: config, facts, runtime,
models.
"""
