"""Local SGD: `average`, its replicas in flat memory, and the rules that combine them."""
