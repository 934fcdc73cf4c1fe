"""Parameters, gradients and optimizer state in shards: `sharded`, on torch's `fully_shard` (FSDP2)."""
