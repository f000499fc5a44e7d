"""Runs stages one after another: pretraining, fine-tuning, evaluation, export.

Each stage is a recipe of its section.
Imports: config, runtime, data, tools/resources, tools/config, tools/planner, tools/prepare, tools/proof,
tools/generate.
"""
