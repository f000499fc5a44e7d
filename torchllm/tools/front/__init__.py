"""What a recipe does before torch is imported: reads, resolves and refuses a run's config; `convert`.

Conditions between keys are in tools/config.
Imports: config, facts, runtime, data, checkpoint, tools/resources, tools/config, tools/planner, tools/launch,
tools/prepare, tools/hub, tools/proof.
"""
