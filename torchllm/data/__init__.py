"""From the tokens of a corpus to the batches of a rank: order, packing, workers, damage to files.

Tokenization, and readers for the formats of others, are in tools/prepare. Imports: config, runtime.
"""
