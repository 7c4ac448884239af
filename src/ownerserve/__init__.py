"""OwnerServe: KV-artifact serving for long-context agents over a fleet of LLM engines."""

__version__ = "0.1.0"
