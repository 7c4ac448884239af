"""The disk tier is a directory of segments and their index, with one writer and any readers.

This folder owns the directory's files and all I/O on them.
"""
