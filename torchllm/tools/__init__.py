"""What starts, plans, proves, watches or converts a run. The core imports none of it.

What computes a step is in the folders of torchllm itself.
"""
