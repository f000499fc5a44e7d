"""The calls of MLflow that torchllm makes."""
