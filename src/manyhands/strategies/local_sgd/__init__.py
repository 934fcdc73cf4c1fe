"""Local SGD: `average`, and the ways in which the workers' copies of a model become one."""
