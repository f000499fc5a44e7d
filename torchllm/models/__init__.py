"""The decoder and its parts for one process; the seams where a layout exchanges parts.

Nothing here knows of ranks: sharding is in parallel. Imports: config, facts, runtime.
"""
