"""The index of a store on disk says which records stand in which segment. SQLite, one writer.

The index is never the truth: when it is lost it is made again from the segments.
"""
