"""Loads a trained model on one device, and generates text with a cache of keys and values.

The command is recipes/generate.py.
Imports: config, runtime, models, data, parallel, checkpoint, tools/config,
tools/continue_texts, tools/prepare, tools/hub, tools/front.
"""
