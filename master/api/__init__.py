"""`tpi serve`: an HTTP server in the forms that people's programs speak. One core (`answers`), thin adapters."""
