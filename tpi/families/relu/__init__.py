"""Families with ReLU, in which most neurons are inactive. ReluLLaMA is not one: it is Llama with another activation."""
