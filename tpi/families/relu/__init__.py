"""Families that are made for ReLU, whose neurons are mostly inactive. ReluLLaMA is a Llama with another activation."""
