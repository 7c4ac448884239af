"""Models and their tokens: checkpoints, the forward passes over paged state, sampling, text."""
