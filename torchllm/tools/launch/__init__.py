"""Starts ranks on nodes, watches over them, starts them again; finds out which rank hangs.

A rank's work within a process group is in runtime.
Imports: config, runtime, checkpoint, tools/config.
"""
