"""Imported once by the pool's fork server, so that a new rank starts with torch and most of the library loaded."""

import gc

import torchllm.adapt.trial
import torchllm.proof.record  # noqa: F401  # imported for what it loads

gc.freeze()  # a collection after each call, on each rank, need not look through all of torch again: 0.2 s
