"""The tree folder is the prefix tree of one cache: what is resident, for whom, and where a turn may
resume.
"""
