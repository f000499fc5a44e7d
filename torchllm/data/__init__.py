"""From the tokens of a corpus to the batches of a rank: order, packing, workers, damage to files.

What makes tokens of text, or reads the formats of others, is in tools/prepare. Imports: config, runtime.
"""
