"""Access to memory: shared segments, page kinds, the journal, small durable files, directory
lock.
"""
