"""Mixers and feed-forward layers that few models have; a model imports only its own. Imports config, models."""
