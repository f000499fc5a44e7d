"""Makes tokens of text and conversations; reads the formats of others where they lie.

Their order in training is in data.
Imports: config, runtime, data.
"""
