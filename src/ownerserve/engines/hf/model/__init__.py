"""This folder holds models and their tokens: checkpoints, the forward passes over paged state,
sampling, text."""
