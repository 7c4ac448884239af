"""This folder keeps a model's state as tensors: what components its layers keep, the pools they lie
in, and the layer objects that transformers' models read and write them through."""
