"""Mixers and feed-forward layers that few models have; a model imports only its own.

The parts of most models are in models itself, and the declarations of all parts in facts/parts. Imports: config, facts,
runtime, models.
"""
