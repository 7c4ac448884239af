"""Drivers and plays of the cache's tests, and SGLang's cache in a process beside."""
