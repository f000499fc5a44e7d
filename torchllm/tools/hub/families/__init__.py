"""A file per family of published models, read in both directions, and the form of such a file.

What reads and writes a model's files is in hub, above. Imports: config, facts.
"""
