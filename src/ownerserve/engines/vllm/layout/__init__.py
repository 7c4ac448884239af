"""This folder says what vLLM keeps for a model and where it lies: components, pages, blocks, a
payload's bytes."""
