"""Pretrain language models with PyTorch. Importing this package imports nothing else; see recipes/pretrain.py."""

__version__ = "0.1.0"
