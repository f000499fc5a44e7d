"""Declarations of mixers and feed-forward layers: parameters, cuts, products, and where their modules are.

The modules are in models. Imports: config.
"""
