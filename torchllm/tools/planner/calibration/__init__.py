"""Calibration: rows of torchllm's own runs, and the constants of a machine fitted to them.

Rows of other frameworks, and the fit to all of them, are in evidence/ of a checkout.
Imports: config, facts, tools/resources, tools/config, tools/planner.
"""
