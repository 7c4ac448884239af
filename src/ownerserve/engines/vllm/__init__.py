"""This package makes OwnerServe the manager of the KV of vLLM as it is installed. See
docs/vllm.md."""
