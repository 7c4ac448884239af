"""The store's runtime: the threads that read and write so that the engine never waits."""
