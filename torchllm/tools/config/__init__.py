"""Reads a run's config from files, flags and variables, checks it, and names what a change of it does.

The keys themselves are in torchllm/config.
Imports: config, facts, runtime, optim, tools/resources.
"""
