"""Which files are mutated, and which tests are judged to see a mutant of each: those that take the least time first."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("torchllm/parallel", "torchllm/train", "torchllm/optim")
RECIPE = "recipes/pretrain.py"

LAYOUTS = ("tests/train/test_evaluate.py", "tests/train/test_step.py")
"""tests that train under several techniques at once"""
CONTEXT = (
    "tests/parallel/test_context.py::test_layout_trains_the_same_model",
    "tests/parallel/test_context.py::test_the_kernel_of_a_gpu_is_checked_in_the_type_of_the_run",
    "tests/parallel/test_context.py::test_selective_recomputation_sends_nothing_again",
)
FLOAT8 = (
    "tests/parallel/test_float8.py::test_rowwise_adds_no_error_to_that_of_one_process",
    "tests/parallel/test_float8.py::test_tensor_parallel_weights_are_gathered_in_16_bits",
)
"""tests of float8 layers that tensor parallelism cuts"""
MEMORY = ("tests/planner/test_memory.py::test_memory_agrees_with_the_dry_run[8B, loss in chunks]",)
"""tests of what is freed early"""

FURTHER_TESTS: dict[str, tuple[str, ...]] = {
    "torchllm/parallel/attention_kernels.py": ("tests/parallel/test_ring.py",),
    "torchllm/parallel/compile.py": ("tests/parallel/test_parallelize.py",),
    "torchllm/parallel/context.py": LAYOUTS,
    "torchllm/parallel/fsdp.py": ("tests/parallel/test_pipeline.py", *LAYOUTS, *MEMORY),
    "torchllm/parallel/kernel_check.py": ("tests/parallel/test_attention_kernels.py",),
    "torchllm/parallel/mesh.py": ("tests/metrics/test_breakdown.py", "tests/adapt/test_rebuild.py", *LAYOUTS),
    "torchllm/parallel/parallelize.py": ("tests/parallel/test_fsdp.py", *CONTEXT, *LAYOUTS, *FLOAT8),
    "torchllm/parallel/pipeline.py": ("tests/optim/test_grad_norm.py", *LAYOUTS),
    "torchllm/parallel/recompute.py": CONTEXT,
    "torchllm/parallel/ring.py": CONTEXT,
    "torchllm/parallel/saved_results.py": CONTEXT,
    "torchllm/parallel/shared_sequence.py": ("tests/parallel/test_expert.py", "tests/parallel/test_experts.py"),
    "torchllm/parallel/tensor.py": ("tests/parallel/test_expert.py", *LAYOUTS, *FLOAT8),
    "torchllm/parallel/weight_gradients.py": LAYOUTS,
    "torchllm/optim/expert_balance.py": ("tests/train/test_step.py", "tests/parallel/test_experts.py"),
    "torchllm/optim/grad_norm.py": ("tests/parallel/test_pipeline.py::test_tied_embeddings_on_two_stages", *LAYOUTS),
    "torchllm/optim/optimizer.py": ("tests/checkpoint/test_checkpointer.py", *LAYOUTS),
    "torchllm/optim/fused.py": ("tests/optim/test_optimizer.py", "tests/checkpoint/test_checkpointer.py", *LAYOUTS),
    "torchllm/train/evaluate.py": ("tests/recipes/test_pretrain.py",),
    "torchllm/train/step.py": ("tests/metrics/test_monitor.py", "tests/recipes/test_pretrain.py"),
    RECIPE: ("tests/adapt/test_supervise.py",),
}
"""beside the tests that mirror the file"""


def mutated_files() -> list[str]:
    """Return the paths of all files that are mutated."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))]
    return [*(str(path.relative_to(ROOT)) for path in files), RECIPE]


def relevant_tests(file: str) -> list[str]:
    """Return the tests of a file, as arguments of pytest, in the order in which they run."""
    path = Path(file)
    mirrored = Path("tests", *path.parts[-2:-1], f"test_{path.name}")
    tests = [str(mirrored)] if (ROOT / mirrored).exists() else []
    return [*tests, *FURTHER_TESTS.get(file, ())]
