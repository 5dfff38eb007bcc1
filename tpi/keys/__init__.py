"""Who is who: this machine's key, the keys of others that it trusts, and how two machines get to trust each other."""
