"""Imported once by the fork server, so that a new rank starts with torch and the library already loaded."""

import gc

import tests.parity  # noqa: F401  # and with it most of the library

gc.freeze()  # a collection after each test, on each rank, need not look through all of torch again: 0.2 s
