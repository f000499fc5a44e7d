"""Each technique as a function on a model: FSDP, tensor, pipeline, context, experts, recomputation, compile.

The model is in models, the loss and the step in train. Imports: config, facts, runtime, models, data.
"""
