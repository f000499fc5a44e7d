"""Measured rows: how they are read, scored and compared, and how constants are fitted to them.

The constants are in software.py, above; published rows are in evidence/ of a checkout.
Imports: config, facts, tools/resources, tools/config, tools/planner.
"""
