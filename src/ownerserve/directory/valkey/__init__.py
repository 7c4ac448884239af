"""The directory's memory in Valkey or Redis: one primary with replicas, no cluster mode."""
