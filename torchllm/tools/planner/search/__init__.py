"""Finds the best layouts without predicting all of them, says why they are, and compares them; sizes of a new model.

What a layout costs is in planner, above. Imports: config, facts, tools/resources, tools/config, tools/planner.
"""
