"""Speed of the kernels, of one node and of two; time and memory of a start; cost of idling."""
