"""vLLM as it is installed, with OwnerServe as the manager of its KV. See docs/vllm.md."""
