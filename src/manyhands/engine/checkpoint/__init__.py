"""Checkpoints: how they are stored, what of them is checked, and how a run resumes from one."""
