"""Measures many layouts, one job after another, and writes a table of them.

The choice of the first layouts, and the comparison of rows with the planner, are in tools/planner.
Imports: config, tools/resources, tools/config, tools/planner, tools/launch, tools/proof, tools/front.
"""
