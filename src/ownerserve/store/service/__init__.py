"""The store's runtime is the threads that read and write so that the engine never waits."""
