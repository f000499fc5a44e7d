"""Starts ranks on nodes, watches over them, starts them again; finds out which rank hangs.

What a rank does within a process group is in runtime.
Imports: config, runtime, checkpoint, tools/config.
"""
