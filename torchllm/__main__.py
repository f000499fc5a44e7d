"""`python -P -m torchllm` is the command `torchllm`, where the script is not on the PATH."""

from torchllm.cli import main

main()
