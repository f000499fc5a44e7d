"""Conversations to tokens: messages, calls, templates, which tokens are trained, and examples packed whole.

Files of records, and shards of tokens, are in prepare, above. Imports: config, runtime, data, tools/prepare.
"""
