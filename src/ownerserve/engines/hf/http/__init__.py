"""The worker's OpenAI-compatible HTTP server over one engine."""
