"""This folder is the worker's OpenAI-compatible HTTP server over one engine."""
