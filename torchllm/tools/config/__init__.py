"""Reads a run's config from files, flags and variables, checks it, and names the effects of a change.

The keys themselves are in torchllm/config.
Imports: config, facts, runtime, optim, tools/resources.
"""
