"""Requests and their answers in the server's own types.

Each API form translates its bodies to the server's types and back.
"""
