"""A model in stages: `layers` and `pipeline`, their partition, schedule and links between stages."""
