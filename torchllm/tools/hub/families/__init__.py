"""A file per family of published models, read in both directions, the form of such a file, and a file per part of
`facts/parts` with the fields and tensors that families share: experts, Gated DeltaNet and others.

The code that reads and writes a model's files is in hub, above. Imports: config, facts.
"""
