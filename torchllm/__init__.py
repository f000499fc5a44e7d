"""Pretrain language models with PyTorch. Importing this package imports nothing else; see recipes/pretrain.py."""

from torchllm import old_names as old_names

__version__ = "0.2.0.dev0"
