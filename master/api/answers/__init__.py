"""Requests and their answers in the server's own types. Each API form translates its bodies to these types and back."""
