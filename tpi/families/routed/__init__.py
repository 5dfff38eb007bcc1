"""Families with experts whose routers or shared experts differ from those in `tpi.families.mixtures`."""
