"""Families whose blocks norm their output alone, not their input: OLMo 2 and 3, and EXAONE 4."""
