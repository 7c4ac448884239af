"""The format is what lies on a medium, byte for byte: records, their seals, their layouts, segment
files.

Nothing here knows which records a store holds, and nothing decides what is kept.
"""
