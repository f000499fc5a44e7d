"""Conversations to tokens: messages, calls, templates, and which tokens are trained.

Records of conversations, and shards of their tokens, are in prepare, which imports this folder.
Imports: config, data.
"""
