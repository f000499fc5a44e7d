"""Imported once by the pool's fork server, so that a new rank starts with torch and all that a recipe imports."""

import gc

import torchllm.data.loader
import torchllm.metrics.monitor
import torchllm.tools.adapt.supervise
import torchllm.tools.adapt.trial
import torchllm.tools.dry_run.run
import torchllm.tools.proof.record
import torchllm.tools.watch.chosen_kernel
import torchllm.train.evaluate  # noqa: F401  # imported to load their dependencies

gc.freeze()  # a collection after each call, on each rank, need not look through all of torch again: 0.2 s
