"""Real vLLM engines: workers forked from a warm process, and what is asked of them."""
