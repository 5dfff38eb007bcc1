"""How fast this machine is: measured once, then remembered."""
