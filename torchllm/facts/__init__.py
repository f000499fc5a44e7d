"""Arithmetic on a config: shapes and roles of parameters, FLOPs, stages of a pipeline. No torch.

Tensors are in models; what a layout costs is in tools/planner. Imports: config.
"""
