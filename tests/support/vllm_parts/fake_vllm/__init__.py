"""A vLLM scheduler, its block pool and its workers as plain objects, and our scheduler's side over
them. No vLLM is imported; tests/vllm/test_fake_scheduler.py compares the names with vLLM's own."""
