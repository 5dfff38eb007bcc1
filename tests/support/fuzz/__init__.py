"""Inputs that strangers could send, by mutation: what reads them must answer with one of the project's errors."""
