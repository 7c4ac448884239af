"""The ownership directory knows who owns a session, and who holds a prefix. Tables:
docs/directory.md.
"""
