"""Token files of other programs, which are read where they lie: a file per format, chosen by in_place.py.

The search for the files of a source is in prepare. Imports: config, data, tools/prepare.
"""
