"""Measures many layouts, one job after another, and writes a table of them.

Which layouts to measure first, and what rows say of the planner, is in tools/planner.
Imports: config, tools/resources, tools/config, tools/planner, tools/launch, tools/front.
"""
