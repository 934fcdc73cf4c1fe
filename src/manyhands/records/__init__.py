"""What a run and a study leave behind, and how it is read back: specs, records, folders, signatures.

Plain data, checked against a schema, read without torch (law 8). May use `core` and nothing else.
"""
