"""Work on what strangers wrote, chat templates and grammars, in child processes with limits of time and memory."""
