"""The ownership directory: who owns a session, who holds a prefix. Tables: docs/directory.md."""
