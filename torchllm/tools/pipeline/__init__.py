"""Runs stages one after another: pretraining, fine-tuning, evaluation, export.

Each stage is a recipe of its section.
Imports: config, tools/resources, tools/config, tools/planner, tools/proof.
"""
