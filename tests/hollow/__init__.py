"""torch's CUDA build without a GPU: a stand-in for CUDA, and the tests that need one. See docs/hollow_gpu.md."""
