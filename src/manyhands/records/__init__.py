"""The files of runs and studies, and how they are read: specs, records, folders, signatures.

Plain data, checked against a schema, read without torch (law 8). May use `core` and nothing else.
"""
