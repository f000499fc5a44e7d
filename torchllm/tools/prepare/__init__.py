"""Makes tokens of text and conversations; reads the formats of others where they lie.

The order in which they are trained is in data.
Imports: config, runtime, data.
"""
