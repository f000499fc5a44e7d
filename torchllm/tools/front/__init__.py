"""The work of a recipe before torch is imported: read, resolve and refuse a run's config; `convert`.

Conditions between keys are in tools/config.
Imports: config, facts, runtime, data, checkpoint, tools/resources, tools/config, tools/planner, tools/launch,
tools/prepare, tools/hub, tools/proof.
"""
