"""Token files of other programs, which are read where they lie: a file per format.

What chooses one is in_place.py, above. Imports: data, tools/prepare.
"""
