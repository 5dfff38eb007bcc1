"""Untrusted work (chat templates and grammars from outside) in child processes with limits of time and memory."""
