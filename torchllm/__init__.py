"""Pretrain language models with PyTorch. Importing this package imports nothing else; see recipes/pretrain.py."""

__version__ = "0.2.0.dev0"
