"""Synchronous data parallelism: `allreduce` on the arena, or on torch's DDP where the model is on CUDA."""
