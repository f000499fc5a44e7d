"""Benchmarks of a checkout, in addition to recipes/benchmark."""

NAMES = ("checkpoint", "titan")
"""each is a function (config, runtime) of this name in the file NAME.py of this folder"""
