"""The layout of what vLLM keeps for a model: components, pages, blocks, a payload's bytes."""
