"""Families with ReLU, in which most neurons are inactive. ReluLLaMA belongs to the family of Llama, with another
activation.
"""
