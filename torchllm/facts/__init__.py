"""Arithmetic on a config: shapes and roles of parameters, FLOPs, stages of a pipeline. No torch.

Tensors are in models; the costs of layouts are in tools/planner. Imports: config.
"""
