"""What mixers and feed-forward layers declare: parameters, cuts, products, and where their modules are.

The modules are in models. Imports: config.
"""
