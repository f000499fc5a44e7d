"""A process and its group: device, exchanges, stops, heartbeats, errors, and torch's private names.

The launcher, and how ranks find each other, are in tools/launch. Imports: config.
"""
