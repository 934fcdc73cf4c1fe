"""Checkpoints: how they are stored, how they are checked, and how a run resumes from one."""
