"""What a model's blocks cost in time and memory, and how to train with less memory than they would take."""
