"""The directory's memory is in Valkey or Redis here: one primary with replicas, no cluster mode."""
