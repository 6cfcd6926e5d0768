"""A learner on another device than the rows: prefetching, priorities on their way back, CUDA graphs."""
