"""Configs, tokenizers and weights of Hugging Face, in and out; families/ has one file per family.

Checkpoints of a run are in checkpoint.
Imports: config, facts, models, data, parallel, optim, checkpoint, tools/config, tools/prepare.
"""
