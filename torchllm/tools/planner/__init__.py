"""Predicts time and memory of a layout, searches for the best, fits constants to measured rows. No torch.

Published rows, and how the planner is judged by them, are in evidence/ of a checkout.
Imports: config, facts, tools/resources, tools/config.
"""
