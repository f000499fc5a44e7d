"""Finds the best layouts without predicting all of them, says why they are, and compares them; sizes of a new model.

The cost of a layout is in planner, above. Imports: config, facts, tools/resources, tools/config, tools/planner.
"""
