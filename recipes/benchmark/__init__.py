"""Measures on a GPU: a step compared with a bare loop's, and matrix products.

Comparisons with other programs, and the first hour, are in evidence/ of a checkout.
Imports: config, facts, runtime, models, data, parallel, metrics, tools/resources, tools/config, tools/launch,
tools/adapt, tools/front.
"""
