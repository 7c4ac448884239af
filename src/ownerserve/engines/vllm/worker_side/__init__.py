"""This folder is the half of the connector that runs in each of vLLM's workers: it reads, copies
and stores."""
