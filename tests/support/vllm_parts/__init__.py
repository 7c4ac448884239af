"""The vLLM adapter's parts without an engine: specs, packed blocks, soft references."""
